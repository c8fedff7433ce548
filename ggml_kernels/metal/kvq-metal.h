// Entry points of the Metal kernels, for the call sites in patches/.
#pragma once

#include "ggml-metal-device.h"

#ifdef __cplusplus
extern "C" {
#endif

// True when the operation reads or writes one of our cache types and must not reach upstream's code.
bool kvq_metal_owns(const struct ggml_tensor * op);

// Whether this device runs an operation that kvq_metal_owns; false sends it to the CPU, and says once per tensor why.
bool kvq_metal_supports(ggml_metal_device_t dev, const struct ggml_tensor * op);

// Bytes of scratch behind the result of an operation that kvq_metal_owns.
size_t kvq_metal_scratch(const struct ggml_tensor * op);

// Encodes an operation that kvq_metal_owns: FLASH_ATTN_EXT, SET_ROWS, CPY, DUP, CONT or GET_ROWS.
void kvq_metal_encode(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif
