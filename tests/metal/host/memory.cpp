// Memory of the host device, and what instrumented kernels call for every load and store: bounds, alignment, uninitialised
// threadgroup memory, and conflicts: two accesses to a byte by two threads, one of them a store, with no barrier between.
#include "machine.h"
#include "../../host/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <tuple>

namespace metal_host {

// last accesses to a byte of device memory: serial numbers of threadgroups, thread, number of barriers before
struct device_byte {
    uint32_t written_in, read_in;
    uint16_t writer, written_at;
    uint32_t unused;
};
// the same of threadgroup memory; readers: simdgroups that read since the last barrier of the threadgroup
struct group_byte {
    uint32_t serial, written_at, written_step, read_at, read_step, readers;
    uint16_t writer, reader;
    bool     written, many;             // many: lanes of the last reader's simdgroup since its last step
};

static char        * arena;             // device memory, then threadgroup memory
static device_byte * device_shadow;
static group_byte  * group_shadow;
static size_t        used, live;

static dispatch * running;
static range    * last_range;
static bool       lockstep_now;
static uint32_t   serial = 1, epoch_first = 1;     // of threadgroups; the first since the last memory barrier between dispatches
static uint32_t   group_barriers, device_barriers, steps[32];
static unsigned   thread, group_of_thread;

static host::fault_list faults;

static void prepare() {
    if (!arena) {
        arena         = (char *) host::reserve(DEVICE_BYTES + THREADGROUP_BYTES);
        device_shadow = (device_byte *) host::reserve(DEVICE_BYTES*sizeof(device_byte));
        group_shadow  = (group_byte *) host::reserve(THREADGROUP_BYTES*sizeof(group_byte));
    }
}

char * device_allocate(const size_t bytes) {
    prepare();
    if (live == 0) {
        used = 0;
    }
    if (used + bytes + 512 > DEVICE_BYTES) {
        return nullptr;
    }
    char * p = arena + used;
    used += (bytes + 511)/256*256;
    live++;
    return p;
}

void device_free(char *) { live--; }

char * threadgroup_memory() {
    prepare();
    return arena + DEVICE_BYTES;
}

void begin_dispatch(dispatch & d, const bool lockstep) {
    running      = &d;
    lockstep_now = lockstep;
    last_range   = nullptr;
}

void begin_group() {
    serial++;
    group_barriers = device_barriers = 0;
    memset(steps, 0, sizeof(steps));
    memset(threadgroup_memory(), 0xFF, running->threadgroup_bytes);
}

void memory_barrier()                { epoch_first = serial + 1; }
void begin_thread(const unsigned i)  { thread = i; group_of_thread = i/32; }
void order_threadgroup()             { group_barriers++; }
void order_device()                  { device_barriers++; }
void order_simdgroup(const unsigned s) { steps[s]++; }

void fault(const char * kind, const char * detail) {
    faults.add(running ? running->name : "host", kind, [&] { return std::string(" ") + detail + "(thread " + std::to_string(thread) + ")"; });
}

int fault_count() { return faults.count; }

static void device_access(char * p, const size_t size, const bool write) {
    if (!last_range || p < last_range->begin || p + size > last_range->end) {
        last_range = nullptr;
        for (range & r : running->ranges) {
            if (p >= r.begin && p + size <= r.end) {
                last_range = &r;
                break;
            }
        }
        if (!last_range) {
            fault(write ? "store outside the buffers" : "load outside the buffers");
            return;
        }
    }
    device_byte * b = device_shadow + (p - arena);
    for (size_t i = 0; i < size; ++i) {
        device_byte & c = b[i];
        const bool in_flight = c.written_in >= epoch_first && c.written_in != 0;
        const bool foreign = in_flight && (c.written_in != serial || (c.writer != thread && c.written_at == device_barriers));
        if (write) {
            if (foreign) {
                fault("two threads store to one byte of device memory", (last_range->name + " ").c_str());
            }
            if (c.read_in >= epoch_first && c.read_in != serial) {
                fault("a store to device memory that another threadgroup reads", (last_range->name + " ").c_str());
            }
            c.written_in = serial;
            c.writer     = uint16_t(thread);
            c.written_at = uint16_t(device_barriers);
        } else {
            if (foreign) {
                fault("a load of device memory that another thread stores to", (last_range->name + " ").c_str());
            }
            last_range->fetched += c.read_in != serial;
            c.read_in = serial;
        }
    }
}

static void group_access(const size_t at, const size_t size, const bool write) {
    if (at + size > running->threadgroup_bytes) {
        fault(write ? "store outside threadgroup memory" : "load outside threadgroup memory");
        return;
    }
    const uint32_t step = steps[group_of_thread];
    for (size_t i = at; i < at + size; ++i) {
        group_byte & c = group_shadow[i];
        if (c.serial != serial) {
            c = {};
            c.serial = serial;
        }
        const bool recent = c.written && c.written_at == group_barriers;       // no barrier since the store
        const bool own_step = c.written_step == step && !lockstep_now;
        if (recent && c.writer != thread && (c.writer/32u != group_of_thread || own_step)) {
            fault(write ? "two threads store to threadgroup memory without a barrier" : "a load of threadgroup memory that another thread stores to, without a barrier");
        }
        const bool read_now = c.readers && c.read_at == group_barriers;
        if (write) {
            if (read_now && ((c.readers & ~(1u << group_of_thread)) || (c.read_step == step && !lockstep_now && (c.reader != thread || c.many)))) {
                fault("a store to threadgroup memory that another thread reads, without a barrier");
            }
            c.written      = true;
            c.writer       = uint16_t(thread);
            c.written_at   = group_barriers;
            c.written_step = step;
        } else {
            if (!c.written) {
                fault("a load of uninitialised threadgroup memory");
            }
            const bool same_step = read_now && c.reader/32u == group_of_thread && c.read_step == step;
            c.many    = same_step && (c.many || c.reader != thread);
            c.readers = (read_now ? c.readers : 0) | 1u << group_of_thread;
            c.reader  = uint16_t(thread);
            c.read_at   = group_barriers;
            c.read_step = step;
        }
    }
}

static inline void access(void * address, const size_t size, const bool write, const bool aligned) {
    const size_t at = size_t((char *) address - arena);
    if (at >= DEVICE_BYTES + THREADGROUP_BYTES) {
        return;                 // a thread's own memory, tables, arguments
    }
    if (aligned && (uintptr_t) address % size != 0) {
        fault("misaligned access");
    }
    if (at < DEVICE_BYTES) {
        device_access((char *) address, size, write);
    } else {
        if (lockstep_now) {
            step_lane();
        }
        group_access(at - DEVICE_BYTES, size, write);
    }
}

} // namespace metal_host

int metal_host_faults(void) { return metal_host::fault_count(); }

// ---- the instrumentation's calls ----

using metal_host::access;

#define ACCESS(BYTES) \
    extern "C" void __tsan_read##BYTES (void * p)           { access(p, BYTES, false, true); } \
    extern "C" void __tsan_write##BYTES(void * p)           { access(p, BYTES, true,  true); } \
    extern "C" void __tsan_unaligned_read##BYTES (void * p) { access(p, BYTES, false, false); } \
    extern "C" void __tsan_unaligned_write##BYTES(void * p) { access(p, BYTES, true,  false); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)

extern "C" void __tsan_init(void) {}

// the linker sends the kernels' memcpy and memset here
extern "C" void * metal_host_memcpy(void * to, const void * from, size_t bytes) {
    access((void *) from, bytes, false, false);
    access(to, bytes, true, false);
    return memcpy(to, from, bytes);
}
extern "C" void * metal_host_memset(void * to, int value, size_t bytes) {
    access(to, bytes, true, false);
    return memset(to, value, bytes);
}
