// Halves, with CUDA's roundings.
#pragma once

#include "cuda_runtime.h"

namespace cuda_host {
extern float half_values[65536];
uint16_t round_to_half(double x);
}

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
typedef __half half;
typedef __half2 half2;

KVQ_HOST_INLINE float   __half2float(__half x)                   { return cuda_host::half_values[x.bits]; }
KVQ_HOST_INLINE __half  __float2half_rn(float x)                 { return { cuda_host::round_to_half(x) }; }
KVQ_HOST_INLINE __half2 __floats2half2_rn(float x, float y)      { return { __float2half_rn(x), __float2half_rn(y) }; }
KVQ_HOST_INLINE __half2 __float2half2_rn(float x)                { return __floats2half2_rn(x, x); }
KVQ_HOST_INLINE float2  __half22float2(__half2 x)                { return { __half2float(x.x), __half2float(x.y) }; }
KVQ_HOST_INLINE __half  __ushort_as_half(unsigned short x)       { return { x }; }
KVQ_HOST_INLINE unsigned short __half_as_ushort(__half x)        { return x.bits; }
KVQ_HOST_INLINE __half  __hmul(__half a, __half b)               { return { cuda_host::round_to_half(double(__half2float(a))*__half2float(b)) }; }
KVQ_HOST_INLINE __half  __hsub(__half a, __half b)               { return { cuda_host::round_to_half(double(__half2float(a)) - __half2float(b)) }; }
KVQ_HOST_INLINE __half2 __hmul2(__half2 a, __half2 b)            { return { __hmul(a.x, b.x), __hmul(a.y, b.y) }; }
KVQ_HOST_INLINE __half2 __hsub2(__half2 a, __half2 b)            { return { __hsub(a.x, b.x), __hsub(a.y, b.y) }; }
