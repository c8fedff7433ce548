// The C interface of ggml's Metal backend below its operations (ggml-metal-device.h, ggml-metal-context.h), on the host
// machine instead of on Apple's framework. Upstream's C++ files above it are compiled unchanged.
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml-metal.h"
#include "ggml-metal-context.h"
#include "ggml-metal-device.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-ops.h"
#include "kvq.h"
#include "kvq-metal.h"
#include "library.h"
#include "machine.h"

#include <string.h>
#include <unistd.h>

#include <list>

using namespace metal_host;

struct ggml_metal_cv        { constants values; };
struct ggml_metal_pipeline  { const metal_host_entry * entry; };
struct ggml_metal_library   { ggml_metal_device_t dev; ggml_metal_pipelines_t pipelines; };
struct ggml_metal_device    { ggml_metal_device_props props; ggml_metal_library library; ggml_metal_fusion_info * fusion; };
struct ggml_metal           { ggml_metal_device_t dev; };
struct ggml_metal_buffer    { char * data; size_t size; std::list<range> views; };
struct ggml_metal_encoder   { dispatch next; std::vector<std::vector<char>> bytes; bool concurrent; };

// ---- function constants, pipelines, library ----

ggml_metal_cv_t ggml_metal_cv_init(void)    { return new ggml_metal_cv; }
void ggml_metal_cv_free(ggml_metal_cv_t cv) { delete cv; }
void ggml_metal_cv_set_int16(ggml_metal_cv_t cv, int16_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_bool (ggml_metal_cv_t cv, bool    value, int32_t idx) { cv->values[idx] = value; }

ggml_metal_pipeline_t ggml_metal_pipeline_init(void)          { return new ggml_metal_pipeline {}; }
void ggml_metal_pipeline_free(ggml_metal_pipeline_t pipeline) { delete pipeline; }
int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params) { return 1024; }

// The source is Metal's; its translation is among the libraries.
ggml_metal_library_t ggml_metal_library_init_from_source(ggml_metal_device_t dev, const char *, bool) { return new ggml_metal_library { dev, ggml_metal_pipelines_init() }; }
ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) { return lib->dev; }

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params res = {};
    res.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return res;
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t cv) {
    ggml_metal_pipeline_with_params res = {};
    const metal_host_entry * entry = find_entry(base, cv ? cv->values : constants());
    if (!entry) {
        fprintf(stderr, "no kernel %s in METAL_HOST_LIBRARIES\n", base);
        exit(2);
    }
    res.pipeline = ggml_metal_pipeline_init();
    res.pipeline->entry = entry;
    ggml_metal_pipelines_add(lib->pipelines, name, res.pipeline);
    return res;
}

// ---- encoder: a dispatch runs at once ----

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool concurrent) {
    memory_barrier();
    return new ggml_metal_encoder { {}, {}, concurrent };
}
void ggml_metal_encoder_free(ggml_metal_encoder_t encoder) { delete encoder; }
void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t) { memory_barrier(); }
void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t) { memory_barrier(); }
void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t, const char *) {}
void ggml_metal_encoder_debug_group_pop (ggml_metal_encoder_t) {}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, ggml_metal_pipeline_with_params pipeline) {
    encoder->next = {};
    encoder->bytes.clear();
    encoder->next.name = pipeline.pipeline->entry->name;
    encoder->next.run  = pipeline.pipeline->entry->run;
}

static void bind(dispatch & d, const int idx, void * p) {
    if (int(d.buffers.size()) <= idx) {
        d.buffers.resize(size_t(idx) + 1);
    }
    d.buffers[idx] = p;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    encoder->bytes.emplace_back((char *) data, (char *) data + size);
    bind(encoder->next, idx, encoder->bytes.back().data());
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, ggml_metal_buffer_id buffer, int idx) {
    const range * view = (const range *) buffer.metal;
    if (view) {
        bind(encoder->next, idx, view->begin + buffer.offs);
        encoder->next.ranges.push_back(*view);
    } else {
        bind(encoder->next, idx, nullptr);
    }
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int) { encoder->next.threadgroup_bytes = size; }

static std::map<std::string, uint64_t> fetched;         // bytes by tensor

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    dispatch & d = encoder->next;
    const int grid[3] = { tg0, tg1, tg2 }, threads[3] = { tptg0, tptg1, tptg2 };
    for (int i = 0; i < 3; ++i) {
        d.grid[i]    = unsigned(grid[i]);
        d.threads[i] = unsigned(threads[i]);
    }
    if (!encoder->concurrent) {
        memory_barrier();
    }
    run(d);
    for (const range & r : d.ranges) {
        fetched[r.name] += r.fetched;
    }
}

uint64_t metal_host_fetched(const char * tensor) { return fetched[tensor]; }

// ---- device ----

ggml_metal_device_t ggml_metal_device_init(int device, int) {
    ggml_metal_device * dev = new ggml_metal_device {};
    dev->props.device = device;
    snprintf(dev->props.name, sizeof(dev->props.name), "MTL%d", device);
    snprintf(dev->props.desc, sizeof(dev->props.desc), "Metal kernels on the host");
    dev->props.max_buffer_size = dev->props.max_working_set_size = DEVICE_BYTES;
    dev->props.max_theadgroup_memory_size = THREADGROUP_BYTES;
    dev->props.has_simdgroup_reduction = dev->props.has_simdgroup_mm = dev->props.has_unified_memory = dev->props.use_shared_buffers = true;
    dev->props.supports_gpu_family_apple7 = true;
    dev->library = { dev, ggml_metal_pipelines_init() };
    dev->fusion  = ggml_metal_fusion_info_init(false, 0);
    return dev;
}
void ggml_metal_device_free(ggml_metal_device_t dev) {
    ggml_metal_pipelines_free(dev->library.pipelines);
    ggml_metal_fusion_info_free(dev->fusion);
    delete dev;
}
void * ggml_metal_device_get_obj  (ggml_metal_device_t) { return nullptr; }
void * ggml_metal_device_get_queue(ggml_metal_device_t) { return nullptr; }
ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t dev) { return &dev->library; }
const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) { return &dev->props; }
ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) { return dev->fusion; }
const char * ggml_metal_device_id_token(ggml_metal_device_id) { return "host"; }
void ggml_metal_device_get_memory(ggml_metal_device_t, size_t * free, size_t * total) { *free = *total = DEVICE_BYTES; }

bool ggml_metal_device_supports_op(ggml_metal_device_t dev, const ggml_tensor * op) {
    return !kvq_metal_owns(op) || kvq_metal_supports(dev, op);
}

ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t) { return nullptr; }
void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t) {}
void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

// ---- buffers ----

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t, size_t size, bool) {
    char * data = device_allocate(size);
    return data ? new ggml_metal_buffer { data, size, {} } : nullptr;
}
ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t, void *, size_t, size_t) { return nullptr; }
void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    device_free(buf->data);
    delete buf;
}
void * ggml_metal_buffer_get_base (ggml_metal_buffer_t buf) { return buf->data; }
bool   ggml_metal_buffer_is_shared(ggml_metal_buffer_t) { return true; }
void ggml_metal_buffer_clear(ggml_metal_buffer_t buf, uint8_t value) { memset(buf->data, value, buf->size); }
void ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) { memset((char *) t->data + offset, value, size); }
void ggml_metal_buffer_set_tensor(ggml_metal_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) { memcpy((char *) t->data + offset, data, size); }
void ggml_metal_buffer_get_tensor(ggml_metal_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) { memcpy(data, (const char *) t->data + offset, size); }
bool ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

// A kernel that is given a tensor may touch its bytes and the scratch that the allocator put behind a result.
ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    const size_t bytes = t->view_src || t->op == GGML_OP_NONE ? ggml_nbytes(t) : ggml_backend_buft_get_alloc_size(buffer->buft, t);
    buf->views.push_back({ (char *) t->data, (char *) t->data + bytes, t->name, 0 });
    return { &buf->views.back(), 0 };
}

// ---- context ----

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) { return new ggml_metal { dev }; }
void ggml_metal_free(ggml_metal_t ctx) { delete ctx; }
const char * ggml_metal_get_name(ggml_metal_t ctx) { return ctx->dev->props.name; }
void ggml_metal_synchronize(ggml_metal_t) {}
void ggml_metal_set_tensor_async(ggml_metal_t, ggml_tensor * t, const void * data, size_t offset, size_t size) { memcpy((char *) t->data + offset, data, size); }
void ggml_metal_get_tensor_async(ggml_metal_t, const ggml_tensor * t, void * data, size_t offset, size_t size) { memcpy(data, (const char *) t->data + offset, size); }
bool ggml_metal_cpy_tensor_async(ggml_metal_t, ggml_metal_t, const ggml_tensor *, ggml_tensor *) { return false; }
void ggml_metal_graph_optimize(ggml_metal_t, ggml_cgraph *) {}
void ggml_metal_event_record(ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_event_wait  (ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_set_n_cb(ggml_metal_t, int) {}
void ggml_metal_set_abort_callback(ggml_metal_t, ggml_abort_callback, void *) {}
bool ggml_metal_supports_family(ggml_metal_t, int) { return true; }
void ggml_metal_capture_next_compute(ggml_metal_t) {}

// Operations of a cache run as Metal kernels; the rest of a graph, which has none here, on the CPU.
static bool is_kernel(const ggml_tensor * op) {
    return kvq_metal_owns(op) || op->op == GGML_OP_SET_ROWS || op->op == GGML_OP_GET_ROWS || op->op == GGML_OP_CPY || op->op == GGML_OP_FLASH_ATTN_EXT;
}

static void encode(const ggml_metal_t ctx, ggml_cgraph * part) {
    ggml_metal_op_t ops = ggml_metal_op_init(ctx->dev, nullptr, part, ctx->dev->fusion, 0, part->n_nodes, true, false, 0);
    for (int i = 0; i < ggml_metal_op_n_nodes(ops);) {
        i += ggml_metal_op_encode(ops, i);
    }
    ggml_metal_op_free(ops);
}

ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, ggml_cgraph * gf) {
    static const ggml_backend_t cpu = ggml_backend_cpu_init();
    for (int first = 0, next = 0; first < gf->n_nodes; first = next) {
        const bool kernels = is_kernel(gf->nodes[first]);
        for (next = first; next < gf->n_nodes && (ggml_op_is_empty(gf->nodes[next]->op) || is_kernel(gf->nodes[next]) == kernels); ++next) {
            gf->nodes[next]->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        ggml_cgraph part = ggml_graph_view(gf, first, next);
        if (kernels) {
            encode(ctx, &part);
        } else {
            ggml_backend_graph_compute(cpu, &part);
        }
    }
    return GGML_STATUS_SUCCESS;
}

// Programs that link this file find the device in ggml's registry, and cannot end well after a fault.
static void end() {
    if (fault_count()) {
        printf("%d faults\n", fault_count());
        fflush(stdout);
        _exit(1);
    }
}
static const bool registered = (ggml_backend_register(ggml_backend_metal_reg()), atexit(end), true);
