// The functions of kvq-ptx.cuh on the host machine.
#pragma once

#if __CUDA_ARCH__ >= 900
#define KVQ_BULK_COPY
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define KVQ_WGMMA
#endif

namespace cuda_host {
void product_s8 (int * d, const uint32_t * a, const uint32_t * b, bool unsigned_b, int where);
void product_f16(float * d, const uint32_t * a, const uint32_t * b, int where);
void load_matrices(uint32_t * r, uint32_t row, bool transposed, int where);
uint32_t transpose_matrix(uint32_t x, int where);
}

KVQ_HOST_INLINE uint32_t kvq_prmt(uint32_t a, uint32_t b, uint32_t sel)   { return kvq_host_prmt(a, b, sel); }
KVQ_HOST_INLINE uint32_t kvq_bitsel(uint32_t m, uint32_t a, uint32_t b)   { return (a & m) | (b & ~m); }

KVQ_HOST_INLINE void kvq_pdl_wait()   { cuda_host::wait_for_launch(); }
KVQ_HOST_INLINE void kvq_pdl_launch() { cuda_host::allow_launch(); }
KVQ_HOST_INLINE void kvq_cluster_sync(KVQ_HOST_HERE) { cuda_host::sync_cluster(where); }
KVQ_HOST_INLINE float kvq_cluster_load(uint32_t address, int rank) { return cuda_host::load_from_cluster(address, rank); }

template <int BYTES> KVQ_HOST_INLINE void kvq_cp_async(uint32_t dst, const void * src, bool real = true) { cuda_host::copy_async(dst, src, BYTES, real); }
KVQ_HOST_INLINE void kvq_cp_commit() { cuda_host::commit_copies(); }
template <int N> KVQ_HOST_INLINE void kvq_cp_wait() { cuda_host::wait_copies(N); }
KVQ_HOST_INLINE uint32_t kvq_shared(const void * p) { return cuda_host::shared_address(p); }

KVQ_HOST_INLINE void kvq_bulk_init(uint32_t barrier)                  { cuda_host::barrier_init(barrier, 1); }
KVQ_HOST_INLINE void kvq_bulk_fence()                                 { cuda_host::async_fence(); }
KVQ_HOST_INLINE void kvq_bulk_expect(uint32_t barrier, int bytes)     { cuda_host::barrier_arrive(barrier, bytes); }
KVQ_HOST_INLINE void kvq_bulk_copy(uint32_t dst, const void * src, int bytes, uint32_t barrier) { cuda_host::bulk_copy(dst, src, bytes, barrier); }
KVQ_HOST_INLINE void kvq_bulk_wait(uint32_t barrier, int parity)      { cuda_host::barrier_wait(barrier, parity); }
KVQ_HOST_INLINE void kvq_barrier_init(uint32_t barrier, int count)    { cuda_host::barrier_init(barrier, count); }
KVQ_HOST_INLINE void kvq_barrier_arrive(uint32_t barrier)             { cuda_host::barrier_arrive(barrier, 0); }
KVQ_HOST_INLINE void kvq_producers_sync(int group, KVQ_HOST_HERE)     { cuda_host::sync_named(1 + group, 128, where); }
KVQ_HOST_INLINE void kvq_consumers_sync(KVQ_HOST_HERE)                { cuda_host::sync_named(3, 256, where); }
KVQ_HOST_INLINE void kvq_async_fence()                                { cuda_host::async_fence(); }
KVQ_HOST_INLINE void kvq_prefetch_l2(const void *) {}
template <int N> KVQ_HOST_INLINE void kvq_fewer_registers() {}
template <int N> KVQ_HOST_INLINE void kvq_more_registers()  {}

KVQ_HOST_INLINE void kvq_mma_s8(int (&d)[4], uint4 a, uint32_t b0, uint32_t b1, KVQ_HOST_HERE) {
    const uint32_t b[2] = { b0, b1 };
    cuda_host::product_s8(d, &a.x, b, false, where);
}
KVQ_HOST_INLINE void kvq_mma_s8u8(int (&d)[4], uint4 a, uint32_t b0, uint32_t b1, KVQ_HOST_HERE) {
    const uint32_t b[2] = { b0, b1 };
    cuda_host::product_s8(d, &a.x, b, true, where);
}
KVQ_HOST_INLINE void kvq_mma_f16(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1, KVQ_HOST_HERE) {
    const uint32_t b[2] = { b0, b1 };
    cuda_host::product_f16(d, &a.x, b, where);
}
KVQ_HOST_INLINE uint4 kvq_ldmatrix(uint32_t p, KVQ_HOST_HERE)         { uint4 r; cuda_host::load_matrices(&r.x, p, false, where); return r; }
KVQ_HOST_INLINE uint4 kvq_ldmatrix_trans(uint32_t p, KVQ_HOST_HERE)   { uint4 r; cuda_host::load_matrices(&r.x, p, true,  where); return r; }
KVQ_HOST_INLINE uint32_t kvq_transpose(uint32_t x, KVQ_HOST_HERE)     { return cuda_host::transpose_matrix(x, where); }
KVQ_HOST_INLINE float kvq_exp2(float x)                               { return exp2f(x); }

KVQ_HOST_INLINE void kvq_wgmma_fence()  {}
KVQ_HOST_INLINE void kvq_wgmma_commit() { cuda_host::commit_products(); }
template <int N> KVQ_HOST_INLINE void kvq_wgmma_wait(KVQ_HOST_HERE) { cuda_host::wait_products(N, where); }
template <int N> KVQ_HOST_INLINE void kvq_wgmma_hold(float (&)[N]) {}
KVQ_HOST_INLINE uint64_t kvq_wgmma_matrix(uint32_t address, uint32_t rows, uint32_t panels) {
    return uint64_t((address & 0x3FFFF) >> 4) | (uint64_t(panels >> 4) << 16) | (uint64_t(rows >> 4) << 32) | (uint64_t(1) << 62);
}
template <bool TRANS, int N> KVQ_HOST_INLINE void kvq_wgmma(float (&d)[N], const uint32_t (&a)[4], uint64_t b, int add) {
    cuda_host::matrix_product(d, 2*N, a, b, add != 0, TRANS);
}
KVQ_HOST_INLINE void kvq_wgmma_add(float (&d)[32], uint64_t a, uint64_t b) { cuda_host::matrix_product(d, 64, a, b); }
