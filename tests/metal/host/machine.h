// Runs translated kernels on the host and watches what they do to memory.
//
// Threads of a threadgroup are fibres that run in turn until they meet at a barrier or a simdgroup function. The kernels are
// compiled with the instrumentation of ThreadSanitizer, whose calls end in memory.cpp instead of in its runtime.
#pragma once

#include "lane.h"

#include <stdint.h>
#include <string>
#include <vector>

namespace metal_host {

// bytes of a buffer that one dispatch may touch, and how many it read, each once a threadgroup
struct range {
    char * begin, * end;
    std::string name;
    uint64_t fetched;
};

struct dispatch {
    const char * name;
    void (*run)(const metal_host_thread &);
    std::vector<void *> buffers;                // by index
    std::vector<range>  ranges;
    size_t threadgroup_bytes;
    unsigned grid[3], threads[3];
};

// lockstep: lanes of a simdgroup take turns at every access to threadgroup memory, as on hardware that runs them together, and
// conflicts between them are not reported. Upstream's kernels rely on that. Otherwise the order is what the specification
// promises: barriers, and nothing else. Kernels named kernel_kvq* run so, and all with METAL_HOST_STRICT set.
void run(dispatch & d);
void step_lane();                               // the running thread lets the others come as far

// ---- memory.cpp ----

static constexpr size_t DEVICE_BYTES = size_t(1) << 28, THREADGROUP_BYTES = 32768;

char * device_allocate(size_t bytes);
void   device_free(char * p);
char * threadgroup_memory();

void begin_dispatch(dispatch & d, bool lockstep);
void begin_group();                             // of the dispatch: memory of the threadgroup is uninitialised again
void memory_barrier();                          // dispatches before it have finished
void begin_thread(unsigned index);              // accesses from here on are this thread's, by index in the threadgroup
void order_threadgroup();                       // a barrier of the whole threadgroup for its memory
void order_device();
void order_simdgroup(unsigned simdgroup);

// Says what is wrong, once for each kernel and kind, and counts. Nothing else reports: a test asks for the count.
void fault(const char * kind, const char * detail = "");
int  fault_count();

} // namespace metal_host

// for programs: faults so far, and bytes of tensors of that name that kernels have read
extern "C" int metal_host_faults(void);
uint64_t metal_host_fetched(const char * tensor);
