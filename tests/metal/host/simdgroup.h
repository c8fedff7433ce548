// Functions of a simdgroup, its matrices, and barriers (Metal Shading Language specification, sections 6.9 and 6.10).
#pragma once

#include "functions.h"
#include "lane.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };

inline __attribute__((always_inline)) void threadgroup_barrier(mem_flags flags) { metal_host_threadgroup_barrier(int(flags)); }
inline __attribute__((always_inline)) void simdgroup_barrier(mem_flags flags)   { metal_host_simdgroup_barrier(int(flags)); }

// every lane's x, once all lanes of the simdgroup have come to the same call
template <typename T> struct lanes {
    const unsigned char * slots;
    inline __attribute__((always_inline)) lanes(const T & x) : slots((const unsigned char *) metal_host_exchange(&x, sizeof(T))) {
        static_assert(sizeof(T) <= METAL_HOST_SLOT, "a lane's value");
    }
    T operator[](int lane) const {
        T x;
        __builtin_memcpy(&x, slots + size_t(METAL_HOST_SLOT)*(lane & 31), sizeof(T));
        return x;
    }
};

#define ALWAYS template <typename T> inline __attribute__((always_inline)) T
ALWAYS simd_shuffle          (T x, ushort lane)  { return lanes<T>(x)[metal_host_check_lane(lane)]; }
ALWAYS simd_shuffle_xor      (T x, ushort mask)  { return lanes<T>(x)[metal_host_check_lane(metal_host_lane() ^ mask)]; }
ALWAYS simd_shuffle_down     (T x, ushort delta) { const int l = metal_host_lane() + delta; return lanes<T>(x)[l < 32 ? l : metal_host_lane()]; }
ALWAYS simd_shuffle_up       (T x, ushort delta) { const int l = metal_host_lane() - delta; return lanes<T>(x)[l >= 0 ? l : metal_host_lane()]; }
ALWAYS simd_broadcast        (T x, ushort lane)  { return lanes<T>(x)[metal_host_check_lane(lane)]; }
ALWAYS simd_broadcast_first  (T x)               { return lanes<T>(x)[0]; }
ALWAYS simd_sum (T x) { const lanes<T> all(x); T r = all[0]; for (int l = 1; l < 32; ++l) { r += all[l]; } return r; }
ALWAYS simd_max (T x) { const lanes<T> all(x); T r = all[0]; for (int l = 1; l < 32; ++l) { r = max(r, all[l]); } return r; }
ALWAYS simd_min (T x) { const lanes<T> all(x); T r = all[0]; for (int l = 1; l < 32; ++l) { r = min(r, all[l]); } return r; }
#undef ALWAYS
inline __attribute__((always_inline)) bool simd_any(bool x) { const lanes<bool> all(x); bool r = false; for (int l = 0; l < 32; ++l) { r |= all[l]; } return r; }
inline __attribute__((always_inline)) bool simd_all(bool x) { const lanes<bool> all(x); bool r = true;  for (int l = 0; l < 32; ++l) { r &= all[l]; } return r; }

// A lane holds two neighbours of a row. Which ones is not specified, so kernels must not use it, and load and store check
// memory as the lane that touches it.
template <typename T, int C, int R> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "matrices are 8 x 8");
    T own[2];
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T x) { own[0] = own[1] = x; }
};
template <typename T, int N> inline simdgroup_matrix<T, N, N> make_filled_simdgroup_matrix(T x) { return simdgroup_matrix<T, N, N>(x); }

inline int simdgroup_row()    { return metal_host_lane()/4; }
inline int simdgroup_column() { return metal_host_lane()%4*2; }

template <typename T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8> & m, const T * from, ulong stride = 8, ulong origin = 0, bool transpose = false) {
    (void) origin;
    for (int i = 0; i < 2; ++i) {
        const int r = simdgroup_row(), c = simdgroup_column() + i;
        m.own[i] = transpose ? from[c*stride + r] : from[r*stride + c];
    }
}
template <typename T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8> & m, T * to, ulong stride = 8, ulong origin = 0, bool transpose = false) {
    (void) origin;
    for (int i = 0; i < 2; ++i) {
        const int r = simdgroup_row(), c = simdgroup_column() + i;
        (transpose ? to[c*stride + r] : to[r*stride + c]) = m.own[i];
    }
}
template <typename A, typename B> struct simdgroup_pair { A a[2]; B b[2]; };
template <typename D, typename A, typename B, typename C> inline __attribute__((always_inline)) void simdgroup_multiply_accumulate(
        simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, const simdgroup_matrix<C, 8, 8> & c) {
    typedef simdgroup_pair<A, B> pair;
    const lanes<pair> all(pair { { a.own[0], a.own[1] }, { b.own[0], b.own[1] } });
    float sum[2] = { float(c.own[0]), float(c.own[1]) };
    for (int k = 0; k < 8; ++k) {
        const float left = float(all[4*simdgroup_row() + k/2].a[k%2]);
        const pair right = all[4*k + metal_host_lane()%4];
        sum[0] += left*float(right.b[0]);
        sum[1] += left*float(right.b[1]);
    }
    d.own[0] = D(sum[0]);
    d.own[1] = D(sum[1]);
}
template <typename D, typename A, typename B> inline __attribute__((always_inline)) void simdgroup_multiply(
        simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b) {
    simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>(D(0.0f)));
}

} // namespace metal

typedef metal::simdgroup_matrix<half,  8, 8> simdgroup_half8x8;
typedef metal::simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
