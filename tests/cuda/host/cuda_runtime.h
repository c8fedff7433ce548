// CUDA C++ for the host machine: words, vectors, indices, functions of a warp, arithmetic. What the kernels use, no more.
#pragma once

#include "machine.h"

#include <math.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__
// a call that returns a struct into memory is not watched by the compiler; one that is inlined is
#define __forceinline__ inline __attribute__((always_inline))
#define KVQ_HOST_INLINE static inline __attribute__((always_inline))
#define __shared__ thread_local           // one storage, also for the "extern" array; the machine clears it for every block
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#define KVQ_HOST_VECTOR2(T, NAME, BYTES) \
    struct alignas(BYTES) NAME { T x, y; }; \
    KVQ_HOST_INLINE NAME make_##NAME(T x, T y) { return { x, y }; }
#define KVQ_HOST_VECTOR4(T, NAME) \
    struct alignas(16) NAME { T x, y, z, w; }; \
    KVQ_HOST_INLINE NAME make_##NAME(T x, T y, T z, T w) { return { x, y, z, w }; }
KVQ_HOST_VECTOR2(float, float2, 8) KVQ_HOST_VECTOR2(uint32_t, uint2, 8) KVQ_HOST_VECTOR2(int, int2, 8)
KVQ_HOST_VECTOR4(float, float4) KVQ_HOST_VECTOR4(uint32_t, uint4) KVQ_HOST_VECTOR4(int, int4)

KVQ_HOST_INLINE int      min(int a, int b)           { return a < b ? a : b; }
KVQ_HOST_INLINE int      max(int a, int b)           { return a < b ? b : a; }
KVQ_HOST_INLINE unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
KVQ_HOST_INLINE unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

KVQ_HOST_INLINE uint32_t __float_as_uint(float x)    { uint32_t u; memcpy(&u, &x, 4); return u; }
KVQ_HOST_INLINE float    __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
KVQ_HOST_INLINE int      __float2int_rn(float x)     { return int(rintf(x)); }
KVQ_HOST_INLINE int      __ffs(int x)                { return __builtin_ffs(x); }
KVQ_HOST_INLINE int      __popc(unsigned x)          { return __builtin_popcount(x); }
KVQ_HOST_INLINE float    __fadd_rn(float a, float b) { return a + b; }
KVQ_HOST_INLINE float    __fsub_rn(float a, float b) { return a - b; }
KVQ_HOST_INLINE float    __fmul_rn(float a, float b) { return a*b; }
KVQ_HOST_INLINE float    __fdiv_rn(float a, float b) { return a/b; }
KVQ_HOST_INLINE float    __fsqrt_rn(float a)         { return sqrtf(a); }
KVQ_HOST_INLINE float    rsqrtf(float a)             { return 1.0f/sqrtf(a); }

// bytes of (b, a), by the nibbles of sel; bit 3 of a nibble spreads the byte's sign
KVQ_HOST_INLINE uint32_t kvq_host_prmt(uint32_t a, uint32_t b, uint32_t sel) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t s = sel >> 4*i, byte = uint32_t(bytes >> 8*(s & 7)) & 0xFF;
        r |= (s & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8*i;
    }
    return r;
}
KVQ_HOST_INLINE uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t sel) { return kvq_host_prmt(a, b, sel & 0x7777); }

// ---- warps and blocks ----

#define KVQ_HOST_HERE int where = __builtin_LINE()
KVQ_HOST_INLINE void __syncthreads(KVQ_HOST_HERE)                         { cuda_host::sync_block(where); }
KVQ_HOST_INLINE void __syncwarp(unsigned = 0xFFFFFFFFu, KVQ_HOST_HERE)    { cuda_host::sync_warp(where); }

namespace cuda_host {
uint32_t shuffle(uint32_t mask, uint32_t x, int from, const char * what, int where);       // of the lane's own choice
uint32_t ballot(uint32_t mask, bool x, const char * what, int where);
int      lane();
}
template <typename T> KVQ_HOST_INLINE T kvq_host_shuffle(unsigned mask, T x, int from, const char * what, int where) {
    static_assert(sizeof(T) == 4, "words are exchanged");
    uint32_t u;
    memcpy(&u, &x, 4);
    u = cuda_host::shuffle(mask, u, from, what, where);
    memcpy(&x, &u, 4);
    return x;
}
template <typename T> KVQ_HOST_INLINE T __shfl_sync(unsigned mask, T x, int from, KVQ_HOST_HERE)          { return kvq_host_shuffle(mask, x, from & 31, "__shfl_sync", where); }
template <typename T> KVQ_HOST_INLINE T __shfl_xor_sync(unsigned mask, T x, int lanes, KVQ_HOST_HERE)     { return kvq_host_shuffle(mask, x, cuda_host::lane() ^ lanes, "__shfl_xor_sync", where); }
template <typename T> KVQ_HOST_INLINE T __shfl_down_sync(unsigned mask, T x, int n, KVQ_HOST_HERE) {
    const int l = cuda_host::lane();
    return kvq_host_shuffle(mask, x, l + n < 32 ? l + n : l, "__shfl_down_sync", where);
}
KVQ_HOST_INLINE unsigned __ballot_sync(unsigned mask, bool x, KVQ_HOST_HERE) { return cuda_host::ballot(mask, x, "__ballot_sync", where); }
KVQ_HOST_INLINE bool     __any_sync(unsigned mask, bool x, KVQ_HOST_HERE)    { return cuda_host::ballot(mask, x, "__any_sync", where) != 0; }
KVQ_HOST_INLINE bool     __all_sync(unsigned mask, bool x, KVQ_HOST_HERE)    { return cuda_host::ballot(mask, x, "__all_sync", where) == 0xFFFFFFFFu; }
