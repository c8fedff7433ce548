// Fibres for the threads of a block, barriers, functions of a warp, asynchronous copies and products.
#include "../../host/fibre.h"
#include "cuda_fp16.h"

#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_host {

static constexpr int CLUSTER = 8, NAMED = 16;

enum state { READY, WAITING, DONE };

struct copy { uint32_t dst; const void * src; int bytes; bool real; };
struct product { float * d; int columns; uint32_t a[4]; uint64_t rows, b; bool add, transposed; };     // a, or where the 64 rows are

struct warp;
struct block;

struct thread : thread_view {
    host::fibre fibre;
    state  is;
    uint3  at;
    int    lane;
    warp  * own_warp;
    block * own_block;
    std::vector<copy> copies;                   // since the last commit
    std::deque<std::vector<copy>> copy_groups;
    std::vector<product> products;
    std::deque<std::vector<product>> product_groups;
};

struct warp {
    int lanes, arrived, done;
    const char * what;                          // the function that the waiting lanes are in, and the line of its call
    int where;
    void * lane[32];
    uint32_t clock[CLOCKS], step;
};

struct named_barrier {
    int arrived, wanted, where;
    std::vector<thread *> waiting;
};

struct mbarrier {
    int count, pending, bytes, phase;
    unsigned maker;                             // warp that initialised it, and when
    uint32_t made_at;
    uint32_t arriving[CLOCKS], complete[CLOCKS];        // clocks of the phase that runs, of those before
    std::vector<copy> copies;
    std::vector<std::pair<thread *, int>> waiting;      // and the parity they wait for
};

struct block {
    uint3 index;
    int slot, n_threads, done, at_cluster, cluster_where;
    std::vector<std::unique_ptr<thread>> threads;
    std::vector<warp> warps;
    named_barrier named[NAMED];
    std::map<uint32_t, mbarrier> mbarriers;
    uint32_t engine;                            // clock of the copy engine
    std::vector<char> shared;                   // while another block of the cluster runs
    bool over;
};

static const launch * job;
static std::unique_ptr<block> blocks[CLUSTER];
static block * running;
static int started;                     // blocks of the cluster that runs
static bool backwards;

static thread & self() { return *static_cast<thread *>(now); }

static void wait_here() {
    self().is = WAITING;
    self().fibre.yield();
}

static void thread_main(host::fibre *) {
    job->body();
    thread & t = self();
    t.is = DONE;
    t.own_warp->done++;
    t.own_block->done++;
}

// ---- clocks ----

static void join(uint32_t * to, const uint32_t * from) {
    for (int i = 0; i < CLOCKS; ++i) {
        to[i] = to[i] > from[i] ? to[i] : from[i];
    }
}
// others see what the warp did so far; what it does next is later
static void publish(uint32_t * to, thread & t) {
    join(to, t.clock);
    t.clock[t.warp_index]++;
}

// ---- functions of a warp ----

void meet(const char * what, const int where, void * mine, void (* all)(void * const *)) {
    thread & t = self();
    warp & w = *t.own_warp;
    if (w.arrived == 0) {
        w.what  = what;
        w.where = where;
    } else if (w.what != what || w.where != where) {
        fault("lanes of a warp in different functions of a warp", std::string(w.what) + " of line " + std::to_string(w.where) + ", " + what + " of line " + std::to_string(where));
    }
    w.lane[t.lane] = mine;
    if (++w.arrived + w.done < w.lanes) {
        wait_here();
        return;
    }
    if (w.done > 0) {
        fault("lanes left before a function of a warp", what);
        exit(1);
    }
    w.arrived = 0;
    if (all) {
        all(w.lane);
    }
    for (int i = 0; i < w.lanes; ++i) {
        thread & other = *t.own_block->threads[t.index - t.lane + i];
        if (&other != &t) {
            other.is = READY;
        }
    }
}

int lane() { return self().lane; }

struct shuffled { uint32_t x, result; int from; };

uint32_t shuffle(const uint32_t mask, const uint32_t x, const int from, const char * what, const int where) {
    if (mask != 0xFFFFFFFFu || self().own_warp->lanes != 32) {
        fault("a mask that is not the whole warp", what);
    }
    if (from < 0 || from >= 32) {
        fault("a lane that does not exist", what);
    }
    shuffled mine = { x, 0, from & 31 };
    meet(what, where, &mine, [](void * const * lanes) {
        for (int i = 0; i < 32; ++i) {
            shuffled & s = *(shuffled *) lanes[i];
            s.result = ((const shuffled *) lanes[s.from])->x;
        }
    });
    return mine.result;
}

struct vote { bool x; uint32_t result; };

uint32_t ballot(const uint32_t mask, const bool x, const char * what, const int where) {
    if (mask != 0xFFFFFFFFu || self().own_warp->lanes != 32) {
        fault("a mask that is not the whole warp", what);
    }
    vote mine = { x, 0 };
    meet(what, where, &mine, [](void * const * lanes) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; ++i) {
            bits |= uint32_t(((const vote *) lanes[i])->x) << i;
        }
        for (int i = 0; i < 32; ++i) {
            ((vote *) lanes[i])->result = bits;
        }
    });
    return mine.result;
}

void sync_warp(const int where) {
    meet("__syncwarp", where, nullptr, [](void * const *) { ++*now->step; });
}

static float value(const uint32_t pair, const int i) { return half_values[pair >> 16*i & 0xFFFF]; }

struct operands { void * d; const uint32_t * a, * b; };

void product_f16(float * d, const uint32_t * a, const uint32_t * b, const int where) {
    operands mine = { d, a, b };
    meet("mma.sync f16", where, &mine, [](void * const * lanes) {
        float rows[16][16], columns[8][16];
        for (int l = 0; l < 32; ++l) {
            const operands & o = *(const operands *) lanes[l];
            const int g = l/4, t = l%4;
            for (int i = 0; i < 8; ++i) {
                rows[g + 8*(i/2 & 1)][2*t + 8*(i/4) + (i & 1)] = value(o.a[i/2], i & 1);
            }
            for (int i = 0; i < 4; ++i) {
                columns[g][2*t + 8*(i/2) + (i & 1)] = value(o.b[i/2], i & 1);
            }
        }
        for (int l = 0; l < 32; ++l) {
            float * d = (float *) ((const operands *) lanes[l])->d;
            for (int e = 0; e < 4; ++e) {
                const float * x = rows[l/4 + 8*(e/2)], * y = columns[2*(l%4) + (e & 1)];
                float sum = 0.0f;
                for (int k = 0; k < 16; ++k) {
                    sum += x[k]*y[k];
                }
                d[e] += sum;
            }
        }
    });
}

template <bool UNSIGNED> static void product_bytes(void * const * lanes) {
    int16_t rows[16][32], columns[8][32];
    for (int l = 0; l < 32; ++l) {
        const operands & o = *(const operands *) lanes[l];
        const int g = l/4, t = l%4;
        for (int i = 0; i < 16; ++i) {
            rows[g + 8*(i/4 & 1)][4*t + 16*(i/8) + (i & 3)] = int8_t(o.a[i/4] >> 8*(i & 3));
        }
        for (int i = 0; i < 8; ++i) {
            const uint8_t byte = uint8_t(o.b[i/4] >> 8*(i & 3));
            columns[g][4*t + 16*(i/4) + (i & 3)] = UNSIGNED ? int16_t(byte) : int16_t(int8_t(byte));
        }
    }
    for (int l = 0; l < 32; ++l) {
        int * d = (int *) ((const operands *) lanes[l])->d;
        for (int e = 0; e < 4; ++e) {
            const int16_t * x = rows[l/4 + 8*(e/2)], * y = columns[2*(l%4) + (e & 1)];
            int sum = 0;
            for (int k = 0; k < 32; ++k) {
                sum += x[k]*y[k];
            }
            d[e] += sum;
        }
    }
}

void product_s8(int * d, const uint32_t * a, const uint32_t * b, const bool unsigned_b, const int where) {
    operands mine = { d, a, b };
    meet(unsigned_b ? "mma.sync s8 u8" : "mma.sync s8", where, &mine, unsigned_b ? product_bytes<true> : product_bytes<false>);
}

struct matrix_rows { uint16_t row[8]; uint32_t * r; };

void load_matrices(uint32_t * r, const uint32_t row, const bool transposed, const int where) {
    matrix_rows mine;
    const char * p = shared_pointer(row);
    if (row % 16 != 0) {
        fault("misaligned access", "ldmatrix");
    }
    shared_access(p, 16, LOAD);
    memcpy(mine.row, p, 16);
    mine.r = r;
    meet(transposed ? "ldmatrix.trans" : "ldmatrix", where, &mine, transposed ? [](void * const * lanes) {
        for (int l = 0; l < 32; ++l) {
            for (int m = 0; m < 4; ++m) {
                const uint16_t low = ((const matrix_rows *) lanes[8*m + l%4*2])->row[l/4], high = ((const matrix_rows *) lanes[8*m + l%4*2 + 1])->row[l/4];
                ((matrix_rows *) lanes[l])->r[m] = low | uint32_t(high) << 16;
            }
        }
    } : [](void * const * lanes) {
        for (int l = 0; l < 32; ++l) {
            for (int m = 0; m < 4; ++m) {
                const uint16_t * x = ((const matrix_rows *) lanes[8*m + l/4])->row + l%4*2;
                ((matrix_rows *) lanes[l])->r[m] = x[0] | uint32_t(x[1]) << 16;
            }
        }
    });
}

uint32_t transpose_matrix(const uint32_t x, const int where) {
    shuffled mine = { x, 0, 0 };
    meet("movmatrix", where, &mine, [](void * const * lanes) {
        auto at = [&](const int row, const int column) { return ((const shuffled *) lanes[4*row + column/2])->x >> 16*(column & 1) & 0xFFFF; };
        for (int l = 0; l < 32; ++l) {
            ((shuffled *) lanes[l])->result = at(l%4*2, l/4) | at(l%4*2 + 1, l/4) << 16;
        }
    });
    return mine.result;
}

// ---- barriers of a block ----

static void arrive_at(named_barrier & b, const int threads, const char * kind, const int where, const bool whole) {
    thread & t = self();
    block & own = *t.own_block;
    if (b.arrived == 0) {
        b.where  = where;
        b.wanted = threads;
    } else if (b.where != where || b.wanted != threads) {
        fault("threads of a block at different barriers", std::string(kind) + " of lines " + std::to_string(b.where) + " and " + std::to_string(where));
    }
    b.waiting.push_back(&t);
    if (++b.arrived < b.wanted) {
        wait_here();
        return;
    }
    uint32_t all[CLOCKS] = {};
    for (const thread * o : b.waiting) {
        join(all, o->clock);
    }
    for (warp & w : own.warps) {
        const thread * first = nullptr;
        for (const thread * o : b.waiting) {
            first = o->own_warp == &w ? o : first;
        }
        if (first) {
            join(w.clock, all);
            w.clock[first->warp_index]++;
            w.step++;
        }
    }
    if (whole) {
        order_device();
    }
    for (thread * o : b.waiting) {
        o->is = READY;
    }
    t.is = READY;
    b.arrived = 0;
    b.waiting.clear();
}

void sync_block(const int where) { arrive_at(self().own_block->named[0], self().own_block->n_threads, "__syncthreads", where, true); }

void sync_named(const int id, const int threads, const int where) { arrive_at(self().own_block->named[id], threads, "bar.sync", where, false); }

// ---- clusters: the machine starts the other blocks when the first one waits for them ----

void sync_cluster(const int where) {
    block & b = *self().own_block;
    if (b.at_cluster == 0) {
        b.cluster_where = where;
    } else if (b.cluster_where != where) {
        fault("threads of a block at different barriers", "of a cluster");
    }
    b.at_cluster++;
    wait_here();
}

float load_from_cluster(const uint32_t address, const int rank) {
    const char * p = shared_pointer(address);
    float x = 0.0f;
    if (rank < 0 || rank >= started) {
        fault("a load from the shared memory of a block that may not have begun");
        return x;
    }
    const block & b = *blocks[rank];
    if (b.over) {
        fault("a load from the shared memory of a block that has left");
        return x;
    }
    if (address % 4 != 0) {
        fault("misaligned access", "ld.shared::cluster");
    }
    if (cluster_access(rank, p, 4)) {
        memcpy(&x, &b == running ? p : b.shared.data() + (p - dynamic_shared()), 4);
    }
    return x;
}

void wait_for_launch() { now->waited = true; }

// The next launch may rely on what came before this one.
void allow_launch() {
    if (!now->waited) {
        fault("the next launch is let go before the wait for the one before");
    }
}

// ---- asynchronous copies ----

uint32_t shared_address(const void * p) {
    const ptrdiff_t at = (const char *) p - dynamic_shared();
    if (at < 0 || at > ptrdiff_t(SHARED_BYTES)) {
        fault("an address that is not in dynamic shared memory");
    }
    return uint32_t(at) + FIRST_ADDRESS;
}

char * shared_pointer(const uint32_t address) { return dynamic_shared() + (ptrdiff_t(address) - FIRST_ADDRESS); }

static bool check_copy(const copy & c, const int aligned) {
    if (c.dst % aligned != 0 || (c.real && uintptr_t(c.src) % aligned != 0)) {
        fault("misaligned access", "of an asynchronous copy");
    }
    if (c.dst < FIRST_ADDRESS || c.dst + c.bytes > FIRST_ADDRESS + job->shared) {
        fault("a copy outside shared memory");
        return false;
    }
    return true;
}

void copy_async(const uint32_t dst, const void * src, const int bytes, const bool real) {
    const copy c = { dst, src, bytes, real };
    if (check_copy(c, bytes)) {
        if (real) {
            device_access((const char *) src, bytes, false);
        }
        shared_access(shared_pointer(dst), bytes, BEGIN_COPY);
        memset(shared_pointer(dst), 0xFF, bytes);       // it may arrive at any time until it is waited for
        self().copies.push_back(c);
    }
}

void commit_copies() {
    thread & t = self();
    t.copy_groups.push_back(std::move(t.copies));
    t.copies.clear();
}

static void arrive(const copy & c, const access_kind kind, const uint32_t engine = 0) {
    char * p = shared_pointer(c.dst);
    shared_access(p, c.bytes, kind, engine);
    if (c.real) {
        memcpy(p, c.src, c.bytes);
    } else {
        memset(p, 0, c.bytes);
    }
}

void wait_copies(const int groups_left) {
    thread & t = self();
    while (int(t.copy_groups.size()) > groups_left) {
        for (const copy & c : t.copy_groups.front()) {
            arrive(c, STORE);
        }
        t.copy_groups.pop_front();
    }
}

// ---- barriers in shared memory ----

static mbarrier * find_barrier(const uint32_t at) {
    thread & t = self();
    const auto found = t.own_block->mbarriers.find(at);
    if (found == t.own_block->mbarriers.end()) {
        fault("a barrier in shared memory that was not initialised");
        return nullptr;
    }
    mbarrier & b = found->second;
    if (b.maker != t.warp_index && t.clock[b.maker] < b.made_at) {
        fault("a barrier in shared memory used before its initialisation is ordered");
    }
    return &b;
}

// A phase ends when everyone arrived and the copies it counts are done, which are done no sooner than someone waits.
static void progress(mbarrier & b) {
    if (!b.waiting.empty()) {
        block & own = *self().own_block;
        for (const copy & c : b.copies) {
            own.engine++;
            arrive(c, PROXY_STORE, own.engine);
            b.bytes -= c.bytes;
            b.arriving[ENGINE] = own.engine;
        }
        b.copies.clear();
    }
    if (b.pending != 0 || b.bytes != 0) {
        return;
    }
    join(b.complete, b.arriving);
    memset(b.arriving, 0, sizeof(b.arriving));
    b.pending = b.count;
    b.phase++;
    auto waiting = std::move(b.waiting);
    b.waiting.clear();
    for (const auto & w : waiting) {
        w.first->is = READY;
    }
}

void barrier_init(const uint32_t at, const int count) {
    thread & t = self();
    if (at % 8 != 0) {
        fault("misaligned access", "mbarrier.init");
    }
    shared_access(shared_pointer(at), 8, STORE);
    mbarrier & b = t.own_block->mbarriers[at];
    b = {};
    b.count = b.pending = count;
    b.maker = t.warp_index;
    b.made_at = t.clock[t.warp_index];
}

void barrier_arrive(const uint32_t at, const int bytes) {
    if (mbarrier * b = find_barrier(at)) {
        b->bytes += bytes;
        publish(b->arriving, self());
        if (--b->pending < 0) {
            fault("more arrivals at a barrier than it counts");
        }
        progress(*b);
    }
}

void barrier_wait(const uint32_t at, const int parity) {
    mbarrier * b = find_barrier(at);
    if (!b) {
        return;
    }
    thread & t = self();
    while ((b->phase & 1) == parity) {
        b->waiting.push_back({ &t, parity });
        progress(*b);
        if ((b->phase & 1) == parity) {
            wait_here();
        }
    }
    t.is = READY;
    join(t.clock, b->complete);
}

void bulk_copy(const uint32_t dst, const void * src, const int bytes, const uint32_t barrier) {
    const copy c = { dst, src, bytes, true };
    if (bytes % 16 != 0) {
        fault("misaligned access", "of a bulk copy's size");
    }
    if (check_copy(c, 16)) {
        device_access((const char *) src, bytes, false);
        shared_access(shared_pointer(dst), bytes, BEGIN_BULK);
        memset(shared_pointer(dst), 0xFF, bytes);
        if (mbarrier * b = find_barrier(barrier)) {
            b->copies.push_back(c);
            progress(*b);
        }
    }
}

// ---- products of a warpgroup: every warp's 16 rows by themselves ----

// byte of element (column, k) of the narrow operand
static uint32_t operand_address(const product & p, const int column, const int k) {
    const uint32_t start = uint32_t(p.b & 0x3FFF) << 4, panels = uint32_t(p.b >> 16 & 0x3FFF) << 4, rows = uint32_t(p.b >> 32 & 0x3FFF) << 4;
    const uint32_t at = p.transposed ? start + column/64*panels + k/8*rows + k%8*128 + column%64*2 : start + column/8*rows + column%8*128 + 2*k;
    return at ^ (at >> 7 & 7) << 4;
}

// byte of element (row, k) of the wide operand, in shared memory
static uint32_t row_address(const product & p, const int row, const int k) {
    const uint32_t start = uint32_t(p.rows & 0x3FFF) << 4, rows = uint32_t(p.rows >> 32 & 0x3FFF) << 4, at = start + row/8*rows + row%8*128 + 2*k;
    return at ^ (at >> 7 & 7) << 4;
}

static void touch(const product & p) {
    for (int r = 0; p.rows && r < 16; ++r) {
        for (int k = 0; k < 16; k += 8) {
            shared_access(shared_pointer(row_address(p, self().index/32%4*16 + r, k)), 16, PROXY_LOAD);
        }
    }
    // 8 values in a row are 16 bytes, whatever the swizzle
    for (int c = 0; c < p.columns; c += p.transposed ? 8 : 1) {
        for (int k = 0; k < 16; k += p.transposed ? 1 : 8) {
            shared_access(shared_pointer(operand_address(p, c, k)), 16, PROXY_LOAD);
        }
    }
}

void matrix_product(float * d, const int columns, const uint32_t * a, const uint64_t b, const bool add, const bool transposed) {
    product p = { d, columns, { a[0], a[1], a[2], a[3] }, 0, b, add, transposed };
    if (lane() == 0) {
        touch(p);
    }
    self().products.push_back(p);
}

void matrix_product(float * d, const int columns, const uint64_t a, const uint64_t b) {
    product p = { d, columns, {}, a, b, true, false };
    if (lane() == 0) {
        touch(p);
    }
    self().products.push_back(p);
}

void commit_products() {
    thread & t = self();
    t.product_groups.push_back(std::move(t.products));
    t.products.clear();
}

static void multiply(const product * const * lanes) {
    const product & p = *lanes[0];
    touch(p);
    static float rows[16][16], values[128][16];
    for (int l = 0; l < 32; ++l) {
        for (int i = 0; i < 8; ++i) {
            rows[l/4 + 8*(i/2 & 1)][2*(l%4) + 8*(i/4) + (i & 1)] = value(lanes[l]->a[i/2], i & 1);
        }
    }
    for (int r = 0; p.rows && r < 16; ++r) {
        for (int k = 0; k < 16; ++k) {
            rows[r][k] = half_values[*(const uint16_t *) shared_pointer(row_address(p, self().index/32%4*16 + r, k))];
        }
    }
    for (int c = 0; c < p.columns; ++c) {
        for (int k = 0; k < 16; ++k) {
            values[c][k] = half_values[*(const uint16_t *) shared_pointer(operand_address(p, c, k))];
        }
    }
    for (int l = 0; l < 32; ++l) {
        float * d = lanes[l]->d;
        for (int i = 0; i < p.columns/2; ++i) {
            const float * x = rows[l/4 + 8*(i/2 & 1)], * y = values[i/4*8 + 2*(l%4) + (i & 1)];
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) {
                sum += x[k]*y[k];
            }
            d[i] = p.add ? d[i] + sum : sum;
        }
    }
}

void wait_products(const int groups_left, const int where) {
    int left = groups_left;
    meet("wgmma.wait_group", where, &left, [](void * const * lanes) {
        thread & t = self();
        const int left = *(const int *) lanes[0];
        thread * all[32];
        for (int l = 0; l < 32; ++l) {
            all[l] = t.own_block->threads[t.index - t.lane + l].get();
            if (all[l]->product_groups.size() != all[0]->product_groups.size()) {
                fault("lanes of a warp with different products");
                return;
            }
        }
        while (int(all[0]->product_groups.size()) > left) {
            const size_t n = all[0]->product_groups.front().size();
            for (size_t i = 0; i < n; ++i) {
                const product * one[32];
                for (int l = 0; l < 32; ++l) {
                    one[l] = &all[l]->product_groups.front().at(i);
                }
                multiply(one);
            }
            for (thread * o : all) {
                o->product_groups.pop_front();
            }
        }
    });
}

// ---- blocks ----

static void start(block & b, const int slot, const uint3 index) {
    b.index = index;
    b.slot  = slot;
    b.n_threads = int(job->block.x*job->block.y*job->block.z);
    b.done = b.at_cluster = 0;
    b.engine = 1;
    b.over = false;
    b.mbarriers.clear();
    for (named_barrier & n : b.named) {
        n = {};
    }
    b.warps.assign(size_t(b.n_threads + 31)/32, warp {});
    while (int(b.threads.size()) < b.n_threads) {
        b.threads.emplace_back(new thread);
    }
    for (int i = 0; i < b.n_threads; ++i) {
        thread & t = *b.threads[i];
        warp & w = b.warps[i/32];
        w.lanes = b.n_threads - i/32*32 < 32 ? b.n_threads - i/32*32 : 32;
        w.clock[i/32] = 1;
        t.index = unsigned(i);
        t.warp_index   = unsigned(i/32);
        t.clock  = w.clock;
        t.step   = &w.step;
        t.waited = false;
        t.fibre.body = thread_main;
        t.is     = READY;
        t.at     = { i % job->block.x, i/job->block.x % job->block.y, i/job->block.x/job->block.y };
        t.lane   = i % 32;
        t.own_warp  = &w;
        t.own_block = &b;
        t.copies.clear();
        t.copy_groups.clear();
        t.products.clear();
        t.product_groups.clear();
    }
    begin_block(slot);
}

// Runs a block's threads until all are done or wait for the cluster. False: they wait for each other for ever.
static bool advance(block & b) {
    running = &b;
    blockIdx = b.index;
    use_block(b.slot);
    const int n_warps = int(b.warps.size());
    while (b.done < b.n_threads) {
        bool moved = false;
        for (int k = 0; k < n_warps; ++k) {
            const int w = backwards ? n_warps - 1 - k : k;
            for (bool again = true; again;) {
                again = false;
                for (int i = 0; i < b.warps[w].lanes; ++i) {
                    thread & t = *b.threads[32*w + (backwards ? b.warps[w].lanes - 1 - i : i)];
                    if (t.is == READY) {
                        now = &t;
                        threadIdx = t.at;
                        t.fibre.resume();
                        now = nullptr;
                        moved = again = true;
                    }
                }
            }
        }
        if (!moved) {
            if (b.at_cluster > 0 && b.at_cluster + b.done == b.n_threads) {
                if (b.done > 0) {
                    fault("threads left before a barrier of the cluster");
                }
                return true;
            }
            fault("threads wait for each other for ever");
            return false;
        }
    }
    b.over = true;
    return true;
}

static void release_cluster(block & b) {
    b.at_cluster = 0;
    uint32_t all[CLOCKS] = {};
    for (const warp & w : b.warps) {
        join(all, w.clock);
    }
    for (size_t i = 0; i < b.warps.size(); ++i) {
        join(b.warps[i].clock, all);
        b.warps[i].clock[i]++;
        b.warps[i].step++;
    }
    for (int i = 0; i < b.n_threads; ++i) {
        b.threads[i]->is = READY;
    }
}

// Blocks take turns in the one shared memory there is.
static bool run_cluster(const uint3 first) {
    const size_t bytes = job->shared;
    auto leave = [&](block & b) { b.shared.assign(dynamic_shared(), dynamic_shared() + bytes); };
    auto enter = [&](block & b) { memcpy(dynamic_shared(), b.shared.data(), bytes); };
    leave(*blocks[0]);
    for (int i = 1; i < CLUSTER; ++i) {
        if (!blocks[i]) {
            blocks[i].reset(new block);
        }
        start(*blocks[i], i, { first.x + i, first.y, first.z });
        started = i + 1;
        if (!advance(*blocks[i])) {
            return false;
        }
        leave(*blocks[i]);
    }
    for (bool over = false; !over;) {
        over = true;
        for (const auto & b : blocks) {
            if (b->over != blocks[0]->over) {
                fault("blocks of a cluster at different barriers");
                return false;
            }
        }
        if (blocks[0]->over) {
            break;
        }
        for (const auto & b : blocks) {
            release_cluster(*b);
        }
        for (const auto & b : blocks) {
            enter(*b);
            if (!advance(*b)) {
                return false;
            }
            leave(*b);
            over = over && b->over;
        }
    }
    return true;
}

void run(const launch & l) {
    job = &l;
    gridDim  = { l.grid.x, l.grid.y, l.grid.z };
    blockDim = { l.block.x, l.block.y, l.block.z };
    begin_launch(l.name, l.shared);
    const unsigned n_threads = l.block.x*l.block.y*l.block.z;
    if (n_threads == 0 || n_threads > 1024 || l.shared > SHARED_BYTES) {
        fault("more threads or shared memory than there are");
        return;
    }
    if (!blocks[0]) {
        blocks[0].reset(new block);
    }
    for (unsigned g = 0; g < l.grid.x*l.grid.y*l.grid.z; ++g) {
        const uint3 at = { g % l.grid.x, g/l.grid.x % l.grid.y, g/l.grid.x/l.grid.y };
        backwards = g/CLUSTER % 2 || g % 2;       // results must not depend on which thread comes first
        start(*blocks[0], 0, at);
        started = 1;
        bool good = advance(*blocks[0]);
        if (good && !blocks[0]->over) {
            if (at.x % CLUSTER != 0 || l.grid.x % CLUSTER != 0) {
                fault("a grid that is no multiple of the cluster");
                return;
            }
            good = run_cluster(at);
            g += CLUSTER - 1;
        }
        if (!good) {
            for (auto & b : blocks) {
                for (size_t i = 0; b && i < b->threads.size(); ++i) {
                    b->threads[i]->fibre.restart();
                }
            }
            return;
        }
    }
}

// ---- halves ----

float half_values[65536];

static float half_value(const uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(float(1024 + m), e - 25) : ldexpf(float(m), -24);
    return h & 0x8000 ? -x : x;
}

static const bool filled = [] {
    for (int i = 0; i < 65536; ++i) {
        half_values[i] = half_value(uint16_t(i));
    }
    return true;
}();

uint16_t round_to_half(const double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double a = fabs(x);
    if (a != a) {
        return 0x7FFF;
    }
    if (a >= 65520.0) {
        return sign | 0x7C00;
    }
    if (a < 6.103515625e-05) {
        return sign | uint16_t(nearbyint(a*16777216.0));        // multiples of 2^-24
    }
    int e;
    frexp(a, &e);                                               // a in [2^(e-1), 2^e)
    const int m = int(nearbyint(ldexp(a, 11 - e)));             // 1024 .. 2048
    return sign | uint16_t(((e + 14) << 10) + (m - 1024));
}

} // namespace cuda_host
