// Runs CUDA kernels on the host and watches what they do to memory.
//
// The threads of a block are fibres that run in turn until they meet at a barrier or a function of a warp. Kernels are compiled
// with the instrumentation of ThreadSanitizer, whose calls end in memory.cpp instead of in its runtime.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <string>

namespace cuda_host {

struct extent { unsigned x, y, z; };

struct launch {
    std::string name;
    std::function<void()> body;     // of one thread
    extent grid, block;
    size_t shared;                  // bytes of dynamic shared memory
};
void run(const launch & l);

// ---- what the stand-ins for CUDA's headers call, as the running thread ----

// Functions of a warp: every lane brings what `lane` points to, the last one runs `all` over the lanes. where: line of the call.
void meet(const char * what, int where, void * lane, void (* all)(void * const * lanes));
void sync_warp(int where);
void sync_block(int where);
void sync_named(int id, int threads, int where);
void sync_cluster(int where);
float load_from_cluster(uint32_t address, int rank);
void wait_for_launch();         // the one before has ended
void allow_launch();            // of the next one

uint32_t shared_address(const void * p);
char *   shared_pointer(uint32_t address);

void copy_async(uint32_t dst, const void * src, int bytes, bool real);
void commit_copies();
void wait_copies(int groups_left);

void barrier_init(uint32_t barrier, int count);
void barrier_arrive(uint32_t barrier, int bytes);       // and expects as many bytes
void barrier_wait(uint32_t barrier, int parity);
void bulk_copy(uint32_t dst, const void * src, int bytes, uint32_t barrier);
void async_fence();

void matrix_product(float * d, int columns, const uint32_t * a, uint64_t b, bool add, bool transposed);      // runs when it is waited for
void matrix_product(float * d, int columns, uint64_t a, uint64_t b);        // the same, added, of 64 rows in shared memory
void commit_products();
void wait_products(int groups_left, int where);

// ---- memory.cpp ----

static constexpr size_t DEVICE_BYTES = size_t(1) << 28, SHARED_BYTES = 232448;      // of one block, as compute capability 9.0 has
static constexpr int WARPS = 32, ENGINE = WARPS, CLOCKS = WARPS + 1;                 // the last clock is the copy engine's
static constexpr uint32_t FIRST_ADDRESS = 1040;         // of dynamic shared memory: a multiple of 16 and no more

// the running thread, for the checks
struct thread_view {
    unsigned index, warp_index;     // in the block
    uint32_t * clock;           // [CLOCKS] of its warp
    uint32_t * step;            // of its warp: barriers so far
    bool waited;                // for the launch before
};
extern thread_view * now;       // null outside of kernels

char * device_allocate(size_t bytes);
void   device_free(char * p);
void   device_known(const void * p, size_t bytes, bool known);      // bytes that hold values, or do not
void   allow(const void * p, size_t bytes, const std::string & name);       // what the next launches may touch
void   allow_nothing();

char * dynamic_shared();
void begin_launch(const std::string & name, size_t shared);
void begin_block(int slot);     // shared memory is uninitialised again; slot: of the blocks of a cluster
void use_block(int slot);       // shadow of that block
void order_device();            // a barrier of the whole block

// accesses by a thread, the beginning of copies, and what tensor cores and the copy engine do (engine: its clock)
enum access_kind { LOAD, STORE, BEGIN_COPY, BEGIN_BULK, PROXY_LOAD, PROXY_STORE };
void shared_access(const char * p, size_t bytes, access_kind kind, uint32_t engine = 0);
void device_access(const char * p, size_t bytes, bool write);
bool cluster_access(int slot, const char * p, size_t bytes);

// Says what is wrong, once for each kernel and kind, and counts.
void fault(const char * kind, const std::string & detail = "");
int  fault_count();

} // namespace cuda_host
