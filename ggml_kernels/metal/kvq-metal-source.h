// The kernels' sources as text, one library each, generated when the project is configured (embed.cmake).
#pragma once

enum kvq_metal_library { KVQ_METAL_ROWS, KVQ_METAL_DECODE, KVQ_METAL_PREFILL, KVQ_METAL_LIBRARIES };

extern const char * const kvq_metal_sources[KVQ_METAL_LIBRARIES];
