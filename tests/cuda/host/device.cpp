// A ggml device whose attention and cache writes are the project's CUDA code, run by the host machine; other operations run on
// the CPU. Registered in every program that links this file.
#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "kvq-cuda.cuh"

#include <cxxabi.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>

using namespace cuda_host;

// ---- what CUDA and upstream's common.cuh provide ----

static int setting(const char * variable, const int otherwise) {
    const char * value = getenv(variable);
    return value ? atoi(value) : otherwise;
}

const ggml_cuda_device_info & ggml_cuda_info() {
    // few multiprocessors: a block has many tiles
    static const ggml_cuda_device_info info = { { { __CUDA_ARCH__, setting("CUDA_HOST_SM", 4), SHARED_BYTES } } };
    return info;
}

static std::map<const void *, int> shared_limit;

cudaError_t cudaFuncSetAttribute(const void * kernel, int, const int value) {
    shared_limit[kernel] = value;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void * to, const void * from, const size_t bytes, int, cudaStream_t) {
    memcpy(to, from, bytes);
    device_known(to, bytes, true);
    return cudaSuccess;
}

// The kernels are static functions, so the program's own symbol table has to tell their names.
std::string kvq_host_kernel_name(const void * kernel) {
    static const std::map<size_t, std::string> names = [] {
        std::map<size_t, std::string> found;
        std::ifstream file("/proc/self/exe", std::ios::binary);
        const std::string bytes((std::istreambuf_iterator<char>(file)), {});
        const char * base = bytes.data();
        const auto & header = *(const ElfW(Ehdr) *) base;
        const auto * sections = (const ElfW(Shdr) *) (base + header.e_shoff);
        for (int s = 0; s < header.e_shnum; ++s) {
            if (sections[s].sh_type == SHT_SYMTAB) {
                const auto * symbols = (const ElfW(Sym) *) (base + sections[s].sh_offset);
                for (size_t i = 0; i < sections[s].sh_size/sizeof(*symbols); ++i) {
                    found[symbols[i].st_value] = base + sections[sections[s].sh_link].sh_offset + symbols[i].st_name;
                }
            }
        }
        return found;
    }();
    const auto found = names.find(size_t(kernel));
    if (found == names.end()) {
        return "a kernel";
    }
    int status = 0;
    char * text = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
    std::string name = text ? text : found->second;
    free(text);
    name = name.substr(0, name.find('('));
    return name.compare(0, 5, "void ") ? name : name.substr(5);
}

// ---- buffers ----

static const char * name_of(ggml_backend_buffer_type_t) { return "CUDA on the host"; }
static void   buffer_free(ggml_backend_buffer_t b)          { device_free((char *) b->context); }
static void * buffer_base(ggml_backend_buffer_t b)          { return b->context; }
static void   buffer_memset(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    memset((char *) t->data + offset, value, size);
    device_known((char *) t->data + offset, size, true);
}
static void buffer_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    memcpy((char *) t->data + offset, data, size);
    device_known((char *) t->data + offset, size, true);
}
static void buffer_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) { memcpy(data, (const char *) t->data + offset, size); }
static void buffer_clear(ggml_backend_buffer_t b, uint8_t value) {
    memset(b->context, value, b->size);
    device_known(b->context, b->size, false);               // poison
}

static ggml_backend_buffer_t buffer_allocate(ggml_backend_buffer_type_t type, const size_t size) {
    char * p = device_allocate(size);
    if (!p) {
        return nullptr;
    }
    ggml_backend_buffer_i i = {};
    i.free_buffer   = buffer_free;
    i.get_base      = buffer_base;
    i.memset_tensor = buffer_memset;
    i.set_tensor    = buffer_set;
    i.get_tensor    = buffer_get;
    i.clear         = buffer_clear;
    return ggml_backend_buffer_init(type, i, p, size);
}

static size_t alignment(ggml_backend_buffer_type_t) { return 1024; }      // there is a gap between most tensors
static bool   is_host(ggml_backend_buffer_type_t) { return true; }      // so that the CPU backend can take over an operation

extern ggml_backend_device device;
static ggml_backend_buffer_type buffer_type = { { name_of, buffer_allocate, alignment, nullptr, nullptr, is_host }, &device, nullptr };

// ---- graphs ----

static const char * backend_name(ggml_backend_t) { return "CUDA on the host"; }
static void backend_free(ggml_backend_t b) { delete b; }

// Kernels of node i may touch its tensors; those of a fused launch, the tensors of the nodes behind it too.
static void allow_tensors(const ggml_cgraph * graph, const int first, const int last) {
    auto add = [](const ggml_tensor * t) {
        // copies in 16-byte pieces read a little behind a view, of the tensor that it is a view of
        t = t && t->view_src ? t->view_src : t;
        if (t && t->data) {
            allow(t->data, ggml_nbytes(t), t->name[0] ? t->name : ggml_op_name(t->op));
        }
    };
    allow_nothing();
    for (int i = first; i <= last && i < graph->n_nodes; ++i) {
        add(graph->nodes[i]);
        for (const ggml_tensor * s : graph->nodes[i]->src) {
            add(s);
        }
    }
}

static ggml_status compute(ggml_backend_t, ggml_cgraph * graph) {
    static const ggml_backend_t cpu = ggml_backend_cpu_init();
    static ggml_backend_cuda_context context;
    static const bool trace = setting("CUDA_HOST_TRACE", 0);
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        if (ggml_op_is_empty(node->op)) {
            continue;
        }
        allow_tensors(graph, i, i + 24);
        const int n_done = kvq_cuda_try_fuse(context, graph, i);
        if (trace) {
            printf("node %s %s, %d more\n", ggml_op_name(node->op), node->name, n_done);
        }
        if (n_done) {
            i += n_done;
        } else if (kvq_cuda_owns(node)) {
            allow_tensors(graph, i, i);
            kvq_cuda_compute(context, node);
        } else {
            ggml_cgraph one = ggml_graph_view(graph, i, i + 1);
            ggml_backend_graph_compute(cpu, &one);
            device_known(node->data, ggml_nbytes(node), true);
        }
    }
    return GGML_STATUS_SUCCESS;
}

// ---- device and registry ----

static const char * device_name(ggml_backend_dev_t)        { return "CUDAHOST"; }
static const char * device_description(ggml_backend_dev_t) { return "CUDA kernels on the host"; }
static void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = DEVICE_BYTES; }
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
static void device_props(ggml_backend_dev_t d, ggml_backend_dev_props * p) {
    *p = {};
    p->name = device_name(d);
    p->description = device_description(d);
    p->type = device_type(d);
    device_memory(d, &p->memory_free, &p->memory_total);
}
static ggml_backend_t device_start(ggml_backend_dev_t d, const char *) {
    static ggml_guid guid = { 0xc0, 0xda, 0x05, 0x7e };
    ggml_backend_i i = {};
    i.get_name      = backend_name;
    i.free          = backend_free;
    i.graph_compute = compute;
    return new ggml_backend { &guid, i, d, nullptr };
}
static ggml_backend_buffer_type_t device_buffers(ggml_backend_dev_t) { return &buffer_type; }
static bool device_supports(ggml_backend_dev_t, const ggml_tensor * op) { return !kvq_cuda_owns(op) || kvq_cuda_supports(0, op); }
static bool device_takes(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return type == &buffer_type; }

static const char * registry_name(ggml_backend_reg_t) { return "CUDAHOST"; }
static size_t registry_count(ggml_backend_reg_t) { return 1; }
static ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t) { return &device; }
static ggml_backend_reg registry = { GGML_BACKEND_API_VERSION, { registry_name, registry_count, registry_device, nullptr }, nullptr };

static ggml_backend_device_i device_interface() {
    ggml_backend_device_i i = {};
    i.get_name        = device_name;
    i.get_description = device_description;
    i.get_memory      = device_memory;
    i.get_type        = device_type;
    i.get_props       = device_props;
    i.init_backend    = device_start;
    i.get_buffer_type = device_buffers;
    i.supports_op     = device_supports;
    i.supports_buft   = device_takes;
    return i;
}
ggml_backend_device device = { device_interface(), &registry, nullptr };

// A program cannot end well after a fault.
static void end() {
    if (fault_count()) {
        printf("%d faults\n", fault_count());
        fflush(stdout);
        _exit(1);
    }
}
static const bool registered = (ggml_backend_register(&registry), atexit(end), true);
