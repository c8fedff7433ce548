// Declarations that stand in for Metal's where a kernel is read as C++ for OpenCL, whose address spaces clang checks.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef int int32_t;
typedef long int64_t;
typedef ulong uint64_t;
#define nullptr 0
#define MAXHALF ((half) 65504.0f)

template <typename T, typename F> T as_type(F x) { return __builtin_astype(x, T); }

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_shuffle_down(T, ushort);
template <typename T> T simd_sum(T);
template <typename T> T simd_max(T);
template <typename T> T simd_min(T);
bool simd_any(bool);
bool simd_all(bool);

namespace precise {
float sqrt(float);
float tanh(float);
}

template <typename T> struct simdgroup_matrix { T own[2]; };
template <typename T, int N> simdgroup_matrix<T> make_filled_simdgroup_matrix(T);
template <typename T> void simdgroup_load(__private simdgroup_matrix<T> &, __local const T *, ulong = 8, ulong2 = (ulong2)(0), bool = false);
template <typename T> void simdgroup_load(__private simdgroup_matrix<T> &, __global const T *, ulong = 8, ulong2 = (ulong2)(0), bool = false);
template <typename T> void simdgroup_store(simdgroup_matrix<T>, __local T *, ulong = 8, ulong2 = (ulong2)(0), bool = false);
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D> &, simdgroup_matrix<A>, simdgroup_matrix<B>, simdgroup_matrix<C>);
template <typename D, typename A, typename B> void simdgroup_multiply(__private simdgroup_matrix<D> &, simdgroup_matrix<A>, simdgroup_matrix<B>);

} // namespace metal

typedef metal::simdgroup_matrix<half>  simdgroup_half8x8;
typedef metal::simdgroup_matrix<float> simdgroup_float8x8;
