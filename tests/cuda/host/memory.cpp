// Memory of the host device, and what instrumented kernels call for every load and store: bounds, alignment, memory that nobody
// wrote, and conflicts: two accesses to a byte by two threads, one of them a store, that no barrier orders.
#include "machine.h"
#include "../../host/memory.h"

#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <vector>

// dynamic shared memory, under the names that the kernels give it
alignas(1024) thread_local char smem[cuda_host::SHARED_BYTES + 1024];
asm(".globl smem_any\n.type smem_any, %tls_object\n.set smem_any, smem");

namespace cuda_host {

thread_view * now;

// last accesses to a byte of device memory: serial numbers of blocks, thread, number of barriers before
struct device_byte {
    uint32_t written_in, read_in;
    uint16_t writer, written_at;
    uint8_t  known;
};
// the same of shared memory, in clocks of warps
struct shared_byte {
    uint32_t serial, written_at, written_step, readers, read_step;
    uint16_t writer, reader, fences;
    bool     touched, known, many;      // many: threads of the last reader's warp since its last barrier
    uint8_t  engine;                    // written by the copy engine
};
struct shadow {
    shared_byte * byte;
    uint32_t (* read_at)[WARPS];        // clocks of the warps that read since the last store
    uint32_t serial;
};
struct range { const char * begin, * end; std::string name; };

static char        * arena;
static device_byte * device_shadow;
static size_t        used, live;
static char        * window;            // thread-local storage of the program: all shared memory
static size_t        window_bytes;
static shadow        shadows[8], * here;
static uint32_t      fences_of[8][32*WARPS], * fences;          // by thread: fences before the tensor cores and the copy engine

static std::vector<range> ranges;
static const range * last_range;
static std::string name;
static size_t   shared_bytes;
static uint32_t serial = 1, epoch_first = 1, before_first = 1;      // of blocks; the first of the launch, of the launch before
static uint32_t device_barriers;

static const void * access_from;        // of the load or store that is being checked
static host::fault_list faults;

static void prepare() {
    if (arena) {
        return;
    }
    arena         = (char *) host::reserve(DEVICE_BYTES);
    device_shadow = (device_byte *) host::reserve(DEVICE_BYTES*sizeof(device_byte));
    dl_iterate_phdr([](dl_phdr_info * info, size_t, void *) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type == PT_TLS) {
                window       = (char *) info->dlpi_tls_data;
                window_bytes = info->dlpi_phdr[i].p_memsz;
            }
        }
        return 1;               // the program itself comes first
    }, nullptr);
    if (!window || smem < window || smem + sizeof(smem) > window + window_bytes) {
        fprintf(stderr, "no thread-local storage of the program\n");
        exit(2);
    }
    for (shadow & s : shadows) {
        s.byte    = (shared_byte *) host::reserve(window_bytes*sizeof(shared_byte));
        s.read_at = (uint32_t (*)[WARPS]) host::reserve(window_bytes*sizeof(*s.read_at));
    }
}

char * device_allocate(const size_t bytes) {
    prepare();
    if (live == 0) {
        used = 0;
    }
    if (used + bytes + 4096 > DEVICE_BYTES) {
        return nullptr;
    }
    char * p = arena + used + 1024;
    used += 1024 + (bytes + 1023)/1024*1024;
    live++;
    device_known(p, bytes, false);
    return p;
}

void device_free(char *) { live--; }

void device_known(const void * p, const size_t bytes, const bool known) {
    const size_t at = size_t((const char *) p - arena);
    for (size_t i = 0; at < DEVICE_BYTES && i < bytes; ++i) {
        device_shadow[at + i] = {};
        device_shadow[at + i].known = known;
    }
}

void allow(const void * p, const size_t bytes, const std::string & what) { ranges.push_back({ (const char *) p, (const char *) p + bytes, what }); }
void allow_nothing() { ranges.clear(); }

char * dynamic_shared() { return smem; }

void begin_launch(const std::string & what, const size_t shared) {
    prepare();
    name         = what;
    shared_bytes = shared;
    last_range   = nullptr;
    before_first = epoch_first;
    epoch_first  = serial + 1;
}

void begin_block(const int slot) {
    shadows[slot].serial = ++serial;
    memset(fences_of[slot], 0, sizeof(fences_of[slot]));
    device_barriers = 0;
    memset(smem, 0xFF, shared_bytes);
}

void use_block(const int slot) {
    here   = &shadows[slot];
    fences = fences_of[slot];
}
void async_fence()             { fences[now->index]++; }
void order_device()            { device_barriers++; }

// ", file:line" of an instruction, as far as binutils know
static std::string line_of(const void * instruction) {
    char command[96], text[512] = "";
    snprintf(command, sizeof(command), "addr2line -e /proc/%d/exe %#zx", int(getpid()), size_t(instruction) - 1);
    FILE * pipe = instruction ? popen(command, "r") : nullptr;
    if (pipe) {
        const char * read = fgets(text, sizeof(text), pipe);
        pclose(pipe);
        if (read && !strstr(text, "??")) {
            const char * file = strrchr(text, '/');
            std::string line = file ? file + 1 : text;
            return ", " + line.substr(0, line.find_first_of(" \n"));
        }
    }
    return "";
}

void fault(const char * kind, const std::string & detail) {
    faults.add(name, kind, [&] {
        return (detail.empty() ? "" : ", " + detail) + " (thread " + std::to_string(now ? int(now->index) : -1) + line_of(access_from) + ")";
    });
}

int fault_count() { return faults.count; }

void device_access(const char * p, const size_t size, const bool write) {
    if (!last_range || p < last_range->begin || p + size > last_range->end) {
        last_range = nullptr;
        for (const range & r : ranges) {
            if (p >= r.begin && p + size <= r.end) {
                last_range = &r;
                break;
            }
        }
        if (!last_range) {
            const range * near = nullptr;
            for (const range & r : ranges) {
                near = r.begin <= p && (!near || r.begin > near->begin) ? &r : near;
            }
            fault(write ? "store outside the buffers" : "load outside the buffers", near ? std::to_string(p + size - near->end) + " bytes past the end of " + near->name : "");
            return;
        }
    }
    device_byte * b = device_shadow + (p - arena);
    const uint32_t own = here->serial;
    // the launch before may still run
    auto of_launch_before = [](const uint32_t in) { return !now->waited && in >= before_first && in < epoch_first; };
    for (size_t i = 0; i < size; ++i) {
        device_byte & c = b[i];
        const bool in_flight = c.written_in >= epoch_first && c.written_in != 0;
        const bool foreign = in_flight && (c.written_in != own || (c.writer != now->index && c.written_at == device_barriers));
        if (write) {
            if (foreign) {
                fault("two threads store to one byte of device memory", last_range->name);
            }
            if (c.read_in >= epoch_first && c.read_in != own) {
                fault("a store to device memory that another block reads", last_range->name);
            }
            if (of_launch_before(c.written_in) || of_launch_before(c.read_in)) {
                fault("a store before the wait for the launch before, to what that used", last_range->name);
            }
            c.written_in = own;
            c.writer     = uint16_t(now->index);
            c.written_at = uint16_t(device_barriers);
            c.known      = 1;
        } else {
            if (foreign) {
                fault("a load of device memory that another thread stores to", last_range->name);
            }
            if (of_launch_before(c.written_in)) {
                fault("a load before the wait for the launch before, of what that wrote", last_range->name);
            }
            if (!c.known) {
                fault("a load of device memory that nobody wrote", last_range->name);
            }
            c.read_in = own;
        }
    }
}

// Head sizes 80, 96 and 112 fill products of 32 values with whatever lies behind a row, which meets zeros.
static const bool padding_allowed = getenv("CUDA_HOST_PADDING");

void shared_access(const char * p, const size_t size, const access_kind kind, const uint32_t engine) {
    const size_t at = size_t(p - window);
    const bool dynamic = p >= smem && p < smem + sizeof(smem);
    const bool load = kind == LOAD || kind == PROXY_LOAD, proxy = kind == PROXY_LOAD || kind == BEGIN_BULK;
    if (at + size > window_bytes || (dynamic && p + size > smem + shared_bytes)) {
        fault(load ? "load outside shared memory" : "store outside shared memory");
        return;
    }
    const unsigned me = now->warp_index;
    const uint32_t * clock = now->clock, stamp = clock[me], step = *now->step;
    for (size_t i = at; i < at + size; ++i) {
        shared_byte & c = here->byte[i];
        if (c.serial != here->serial) {
            c = {};
            c.serial = here->serial;
        }
        // the store before this access must come before it
        if (c.touched && kind != PROXY_STORE) {
            const unsigned writer = c.engine ? unsigned(ENGINE) : c.writer/32u;
            const bool ordered = c.engine ? c.written_at <= clock[ENGINE] : writer != me ? c.written_at <= clock[writer] : c.writer == now->index || c.written_step != step;
            if (!ordered) {
                fault(load ? "a load of shared memory that another thread stores to, without a barrier" : "two threads store to shared memory without a barrier");
            }
        }
        if (proxy && c.touched && c.known && !c.engine && fences[c.writer] <= c.fences) {
            fault(load ? "a tensor core loads shared memory that no fence has shown it" : "a bulk copy to shared memory that was stored to, without a fence");
        }
        if (load) {
            if (!c.known && (c.touched || !padding_allowed)) {
                fault(c.touched ? "a load of shared memory that a copy is on its way to" : "a load of uninitialised shared memory", "byte " + std::to_string(i - size_t(smem - window)));
            }
            const bool again = (c.readers >> me & 1) && c.reader/32u == me && c.read_step == step;
            c.many    = again && (c.many || c.reader != now->index);
            c.readers |= 1u << me;
            c.reader  = uint16_t(now->index);
            c.read_step = step;
            here->read_at[i][me] = stamp;
            continue;
        }
        // and so must the loads
        if (c.readers && kind != PROXY_STORE) {
            for (int r = 0; r < WARPS; ++r) {
                if ((c.readers >> r & 1) && (unsigned(r) != me ? here->read_at[i][r] > clock[r] :
                        c.reader/32u == me && c.read_step == step && (c.reader != now->index || c.many))) {
                    fault("a store to shared memory that another thread reads, without a barrier");
                }
            }
        }
        c.touched = true;
        c.known   = kind != BEGIN_COPY && kind != BEGIN_BULK;
        c.engine  = kind == PROXY_STORE;
        c.readers = 0;
        c.many    = false;
        c.writer  = uint16_t(now->index);
        c.written_at   = c.engine ? engine : stamp;
        c.written_step = step;
        c.fences  = uint16_t(fences[now->index]);
    }
}

bool cluster_access(const int slot, const char * p, const size_t size) {
    if (p < smem || p + size > smem + shared_bytes) {
        fault("load outside shared memory", "of the cluster");
        return false;
    }
    for (size_t i = size_t(p - window); i < size_t(p - window) + size; ++i) {
        const shared_byte & c = shadows[slot].byte[i];
        if (c.serial != shadows[slot].serial || !c.known) {
            fault("a load of uninitialised shared memory", "of the cluster");
            return false;
        }
    }
    return true;
}

static inline void access(char * address, const size_t size, const bool write, const bool aligned, const void * from) {
    if (!now) {
        return;                 // the launching program
    }
    const size_t device = size_t(address - arena), shared = size_t(address - window);
    if (device >= DEVICE_BYTES && shared >= window_bytes) {
        return;                 // a thread's own memory, tables, arguments
    }
    access_from = from;
    if (aligned && uintptr_t(address) % size != 0) {
        fault("misaligned access");
    }
    if (device < DEVICE_BYTES) {
        device_access(address, size, write);
    } else {
        shared_access(address, size, write ? STORE : LOAD);
    }
    access_from = nullptr;
}

} // namespace cuda_host

// ---- the instrumentation's calls ----

using cuda_host::access;

#define ACCESS(BYTES) \
    extern "C" void __tsan_read##BYTES (void * p)           { access((char *) p, BYTES, false, true, __builtin_return_address(0)); } \
    extern "C" void __tsan_write##BYTES(void * p)           { access((char *) p, BYTES, true, true, __builtin_return_address(0)); } \
    extern "C" void __tsan_unaligned_read##BYTES (void * p) { access((char *) p, BYTES, false, false, __builtin_return_address(0)); } \
    extern "C" void __tsan_unaligned_write##BYTES(void * p) { access((char *) p, BYTES, true, false, __builtin_return_address(0)); } \
    extern "C" void __tsan_volatile_read##BYTES (void * p)  { access((char *) p, BYTES, false, true, __builtin_return_address(0)); } \
    extern "C" void __tsan_volatile_write##BYTES(void * p)  { access((char *) p, BYTES, true, true, __builtin_return_address(0)); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)

extern "C" void __tsan_init(void) {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit(void) {}
extern "C" void __tsan_read_range (void * p, size_t bytes) { access((char *) p, bytes, false, false, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void * p, size_t bytes) { access((char *) p, bytes, true, false, __builtin_return_address(0)); }
