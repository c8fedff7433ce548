// Fibres for the threads of a threadgroup, barriers and the exchange of values in a simdgroup.
#include "../../host/fibre.h"
#include "machine.h"

#include <stdlib.h>
#include <string.h>

#include <memory>

namespace metal_host {

enum state { READY, AT_SIMDGROUP, AT_THREADGROUP, DONE };

struct fibre : host::fibre {
    state is = DONE;
    metal_host_thread thread;
};

struct simdgroup {
    int lanes, waiting, done, exchanges;
    const void * site;      // of the call that the waiting lanes are in
    int flags;
    alignas(16) unsigned char slots[2][32*METAL_HOST_SLOT];
};

static std::vector<std::unique_ptr<fibre>> fibres;
static std::vector<simdgroup> simdgroups;
static fibre * current;
static const dispatch * job;
static int n_threads, waiting, done;
static const void * barrier_site;
static std::vector<std::unique_ptr<char[]>> arrays;         // threadgroup arrays declared in kernels

static void yield() { current->host::fibre::yield(); }

static void run_thread(host::fibre *) {
    job->run(current->thread);
    current->is = DONE;
    simdgroups[current->thread.simdgroup_index_in_threadgroup].done++;
    done++;
}

static void resume(fibre & f) {
    current = &f;
    begin_thread(f.thread.thread_index_in_threadgroup);
    f.body = run_thread;
    f.resume();
}

static void release(const state from, const int first, const int count) {
    for (int i = first; i < first + count; ++i) {
        if (fibres[i]->is == from) {
            fibres[i]->is = READY;
        }
    }
}

// after every step: lanes or threads that have all arrived go on
static void settle(const int index) {
    simdgroup & s = simdgroups[index];
    if (s.waiting > 0 && s.waiting + s.done == s.lanes) {
        if (s.done > 0) {
            fault("lanes left before a simdgroup function");
        }
        s.waiting = 0;
        s.exchanges++;
        if (s.flags & 2) {
            order_simdgroup(unsigned(index));
        }
        release(AT_SIMDGROUP, 32*index, s.lanes);
    }
    if (waiting > 0 && waiting + done == n_threads) {
        if (done > 0) {
            fault("threads left before a threadgroup barrier");
        }
        waiting = 0;
        release(AT_THREADGROUP, 0, n_threads);
    }
}

static void run_group(const bool reversed) {
    waiting = done = 0;
    for (simdgroup & s : simdgroups) {
        s.waiting = s.done = s.exchanges = 0;
    }
    for (int i = 0; i < n_threads; ++i) {
        fibres[i]->is = READY;
    }
    while (done < n_threads) {
        bool moved = false;
        for (int k = 0; k < n_threads; ++k) {
            const int i = reversed ? n_threads - 1 - k : k;
            if (fibres[i]->is == READY) {
                resume(*fibres[i]);
                settle(i/32);
                moved = true;
            }
        }
        if (!moved) {
            fault("threads wait for each other for ever");
            for (auto & f : fibres) {
                f->restart();
            }
            return;
        }
    }
}

void run(dispatch & d) {
    const bool lockstep = strncmp(d.name, "kernel_kvq", 10) != 0 && !getenv("METAL_HOST_STRICT");
    n_threads = int(d.threads[0]*d.threads[1]*d.threads[2]);
    if (n_threads > 1024 || d.threadgroup_bytes > THREADGROUP_BYTES) {
        fault("more threads or threadgroup memory than there are");
        return;
    }
    job = &d;
    while (int(fibres.size()) < n_threads) {
        fibres.emplace_back(new fibre);
    }
    simdgroups.resize(size_t(n_threads + 31)/32);
    for (size_t s = 0; s < simdgroups.size(); ++s) {
        simdgroups[s].lanes = n_threads - int(32*s) < 32 ? n_threads - int(32*s) : 32;
    }
    begin_dispatch(d, lockstep);
    void * shared[1] = { threadgroup_memory() };
    for (unsigned g = 0; g < d.grid[0]*d.grid[1]*d.grid[2]; ++g) {
        const metal_host_position at = { g % d.grid[0], g/d.grid[0] % d.grid[1], g/d.grid[0]/d.grid[1] };
        for (int i = 0; i < n_threads; ++i) {
            metal_host_thread & t = fibres[i]->thread;
            t.buffer      = d.buffers.data();
            t.threadgroup = shared;
            t.threadgroup_position_in_grid = at;
            t.threadgroups_per_grid        = { d.grid[0], d.grid[1], d.grid[2] };
            t.threads_per_threadgroup      = { d.threads[0], d.threads[1], d.threads[2] };
            t.thread_position_in_threadgroup = { i % d.threads[0], i/d.threads[0] % d.threads[1], i/d.threads[0]/d.threads[1] };
            const metal_host_position & p = t.thread_position_in_threadgroup;
            t.thread_position_in_grid = { at.x*d.threads[0] + p.x, at.y*d.threads[1] + p.y, at.z*d.threads[2] + p.z };
            t.thread_index_in_threadgroup    = unsigned(i);
            t.thread_index_in_simdgroup      = unsigned(i) % 32;
            t.simdgroup_index_in_threadgroup = unsigned(i)/32;
            t.simdgroups_per_threadgroup     = unsigned(simdgroups.size());
            t.threads_per_simdgroup          = 32;
        }
        arrays.clear();
        begin_group();
        run_group(g % 2);         // results must not depend on which lane comes first
    }
}

void step_lane() { yield(); }

static void arrive(const void * site, const int flags) {
    simdgroup & s = simdgroups[current->thread.simdgroup_index_in_threadgroup];
    if (s.waiting++ == 0) {
        s.site = site;
    } else if (s.site != site) {
        fault("lanes of a simdgroup in different simdgroup functions");
    }
    s.flags = flags;
    current->is = AT_SIMDGROUP;
    yield();
}

} // namespace metal_host

using namespace metal_host;

int metal_host_lane(void) { return int(current->thread.thread_index_in_simdgroup); }

const void * metal_host_exchange(const void * mine, size_t bytes) {
    simdgroup & s = simdgroups[current->thread.simdgroup_index_in_threadgroup];
    unsigned char * slots = s.slots[s.exchanges & 1];
    memcpy(slots + METAL_HOST_SLOT*current->thread.thread_index_in_simdgroup, mine, bytes);
    arrive(__builtin_return_address(0), 0);
    return slots;
}

void metal_host_simdgroup_barrier(int flags) { arrive(__builtin_return_address(0), flags); }

void metal_host_threadgroup_barrier(int flags) {
    if (waiting++ == 0) {
        barrier_site = __builtin_return_address(0);
    } else if (barrier_site != __builtin_return_address(0)) {
        fault("threads of a threadgroup at different barriers");
    }
    if (waiting + done == n_threads) {
        if (flags & 1) {
            order_device();
        }
        if (flags & 2) {
            order_threadgroup();
        }
    }
    current->is = AT_THREADGROUP;
    yield();
}

int metal_host_check_lane(int lane) {
    if (lane < 0 || lane >= 32) {
        fault("a lane that does not exist");
    }
    return lane & 31;
}

void * metal_host_threadgroup_array(int id, size_t bytes) {
    if (int(arrays.size()) <= id) {
        arrays.resize(size_t(id) + 1);
    }
    if (!arrays[id]) {
        arrays[id].reset(new char[bytes]);
    }
    return arrays[id].get();
}
