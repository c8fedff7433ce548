// What a translated kernel asks of the machine that runs it (machine.cpp). Calls are convergent: the compiler must not move
// them into or out of branches.
#pragma once

#include <stddef.h>

#define METAL_HOST_SLOT 64          // bytes that a lane can show the others
#define METAL_HOST_CONVERGENT __attribute__((convergent, noinline))

extern "C" {
int  metal_host_lane(void) __attribute__((pure));                     // index in the simdgroup
const void * metal_host_exchange(const void * mine, size_t bytes) METAL_HOST_CONVERGENT;     // [32] slots
void metal_host_threadgroup_barrier(int flags) METAL_HOST_CONVERGENT;
void metal_host_simdgroup_barrier  (int flags) METAL_HOST_CONVERGENT;
int  metal_host_check_lane(int lane);                                 // reports a lane that does not exist
void * metal_host_threadgroup_array(int id, size_t bytes);            // of the running threadgroup
int  metal_host_function_constant(int index);
}

// ---- launching: what translate.py's table of entry points is made of ----

struct metal_host_position { unsigned x, y, z; };

// arguments of one thread
struct metal_host_thread {
    void * const * buffer;              // by index
    void * const * threadgroup;
    metal_host_position threadgroup_position_in_grid, threadgroups_per_grid, threads_per_threadgroup, thread_position_in_threadgroup, thread_position_in_grid;
    unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, threads_per_simdgroup;
};
struct metal_host_entry {
    const char * name;
    void (*run)(const metal_host_thread &);
};
extern "C" const metal_host_entry metal_host_entries[];     // of a library; the last has no name
