// The instructions that the kernels use beyond CUDA C++, a function each. With KVQ_HOST_MACHINE the functions come from
// tests/cuda/host, which runs the kernels on a CPU.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define KVQ_AMPERE
#endif

#ifdef KVQ_HOST_MACHINE
#include <kvq-ptx-host.h>
#else

// prmt as the instruction is: __byte_perm masks the selector first
static __device__ __forceinline__ uint32_t kvq_prmt(const uint32_t a, const uint32_t b, const uint32_t sel) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
}

// bits of a where m is set, of b elsewhere, in one instruction
static __device__ __forceinline__ uint32_t kvq_bitsel(const uint32_t m, const uint32_t a, const uint32_t b) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "r"(m));
    return r;
}

static __device__ __forceinline__ void kvq_pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
static __device__ __forceinline__ void kvq_pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// all blocks of a cluster
static __device__ __forceinline__ void kvq_cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// word at this block's shared address, in the shared memory of another block of the cluster
static __device__ __forceinline__ float kvq_cluster_load(const uint32_t address, const int rank) {
    float x = 0.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.f32 %0, [a];\n}" : "=f"(x) : "r"(address), "r"(rank) : "memory");
#endif
    return x;
}

#ifdef KVQ_AMPERE
// copies BYTES bytes, or writes zeros when there is no source
template <int BYTES> static __device__ __forceinline__ void kvq_cp_async(const uint32_t dst, const void * src, const bool real = true) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(dst), "l"(src), "r"(real ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(dst), "l"(src), "r"(real ? 4 : 0) : "memory");
    }
}
static __device__ __forceinline__ void kvq_cp_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void kvq_cp_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
static __device__ __forceinline__ uint32_t kvq_shared(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

// The copy engine of compute capability 9.0: one thread asks for a run of bytes, a barrier in shared memory counts them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVQ_BULK_COPY
static __device__ __forceinline__ void kvq_bulk_init(const uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}
// after initialising barriers, and after writing with ordinary stores what the copy engine will overwrite
static __device__ __forceinline__ void kvq_bulk_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void kvq_bulk_expect(const uint32_t barrier, const int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void kvq_bulk_copy(const uint32_t dst, const void * src, const int bytes, const uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}
static __device__ __forceinline__ void kvq_bulk_wait(const uint32_t barrier, const int parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
#endif

// asks for the line to be brought into the L2 cache
static __device__ __forceinline__ void kvq_prefetch_l2(const void * p) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

static __device__ __forceinline__ void kvq_mma_s8(int (&d)[4], const uint4 a, const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ void kvq_mma_s8u8(int (&d)[4], const uint4 a, const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ void kvq_mma_f16(float (&d)[4], const uint4 a, const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ uint4 kvq_ldmatrix(const uint32_t p) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(p));
    return r;
}
static __device__ __forceinline__ uint4 kvq_ldmatrix_trans(const uint32_t p) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(p));
    return r;
}
static __device__ __forceinline__ float kvq_exp2(const float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// transposes an 8 x 8 matrix of halves, of which lane 4*row + t holds columns 2t and 2t + 1
static __device__ __forceinline__ uint32_t kvq_transpose(const uint32_t x) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}
#endif // KVQ_AMPERE

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVQ_WGMMA

static __device__ __forceinline__ void kvq_wgmma_fence()  { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void kvq_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void kvq_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// the compiler must not move uses of the registers across this point
template <int N> static __device__ __forceinline__ void kvq_wgmma_hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(x[i]) :: "memory");
    }
}

// Matrix in shared memory with 128-byte rows, swizzled. rows: bytes from one group of 8 rows to the next; panels: bytes
// from one run of 64 columns to the next (read for transposed operands alone).
static __device__ __forceinline__ uint64_t kvq_wgmma_matrix(const uint32_t address, const uint32_t rows, const uint32_t panels) {
    return uint64_t((address & 0x3FFFF) >> 4) | (uint64_t(panels >> 4) << 16) | (uint64_t(rows >> 4) << 32) | (uint64_t(1) << 62);
}

#define KVQ_F8(x, i)  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
// d = a b, or d += a b: 64 rows, 64 columns, 16 deep; a in registers
template <bool TRANS> static __device__ __forceinline__ void kvq_wgmma(float (&d)[32], const uint32_t (&a)[4], const uint64_t b, const int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : KVQ_F8(d, 0), KVQ_F8(d, 8), KVQ_F8(d, 16), KVQ_F8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS ? 1 : 0));
}
// the same with 128 columns
template <bool TRANS> static __device__ __forceinline__ void kvq_wgmma(float (&d)[64], const uint32_t (&a)[4], const uint64_t b, const int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
        : KVQ_F8(d, 0), KVQ_F8(d, 8), KVQ_F8(d, 16), KVQ_F8(d, 24), KVQ_F8(d, 32), KVQ_F8(d, 40), KVQ_F8(d, 48), KVQ_F8(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS ? 1 : 0));
}
// d += a b: 64 rows, 64 columns, 16 deep; both in shared memory
static __device__ __forceinline__ void kvq_wgmma_add(float (&d)[32], const uint64_t a, const uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : KVQ_F8(d, 0), KVQ_F8(d, 8), KVQ_F8(d, 16), KVQ_F8(d, 24)
        : "l"(a), "l"(b));
}
#undef KVQ_F8

// stores to shared memory so far come before what the tensor cores and the copy engine do next
static __device__ __forceinline__ void kvq_async_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// registers of a thread from here on, for warps that need fewer or more than the kernel was compiled for
template <int N> static __device__ __forceinline__ void kvq_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> static __device__ __forceinline__ void kvq_more_registers()  { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
static __device__ __forceinline__ void kvq_barrier_init(const uint32_t barrier, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
static __device__ __forceinline__ void kvq_barrier_arrive(const uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// the threads of producer warpgroup 0 or 1
static __device__ __forceinline__ void kvq_producers_sync(const int group) {
    if (group == 0) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}
// the threads of both consuming warpgroups
static __device__ __forceinline__ void kvq_consumers_sync() {
    asm volatile("bar.sync 3, 256;" ::: "memory");
}
#endif // sm_90a

#endif // KVQ_HOST_MACHINE
