// Mathematical, integer and relational functions of the Metal Shading Language (specification, chapter 6).
#pragma once

#include "types.h"

template <typename T, typename F> inline T as_type(F x) {
    static_assert(sizeof(T) == sizeof(F), "as_type keeps the size");
    T y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return y;
}

namespace metal {

#define METAL_FUNCTION(name) \
    inline float name(float x) { return __builtin_##name##f(x); } \
    template <int N> inline vec<float, N> name(const vec<float, N> & x) { vec<float, N> r; for (int i = 0; i < N; ++i) { r.v[i] = name(x.v[i]); } return r; }
METAL_FUNCTION(exp) METAL_FUNCTION(exp2) METAL_FUNCTION(log) METAL_FUNCTION(log2) METAL_FUNCTION(sqrt) METAL_FUNCTION(fabs) METAL_FUNCTION(tanh)
METAL_FUNCTION(sin) METAL_FUNCTION(cos) METAL_FUNCTION(floor) METAL_FUNCTION(ceil) METAL_FUNCTION(round) METAL_FUNCTION(rint) METAL_FUNCTION(trunc)
namespace precise {
    METAL_FUNCTION(tanh) METAL_FUNCTION(exp) METAL_FUNCTION(sqrt)
}
#undef METAL_FUNCTION

inline float pow(float x, float y)            { return __builtin_powf(x, y); }
inline float fma(float a, float b, float c)   { return __builtin_fmaf(a, b, c); }
inline float rsqrt(float x)                   { return 1.0f/__builtin_sqrtf(x); }
inline bool  isfinite(float x)                { return __builtin_isfinite(x); }
inline bool  isnan(float x)                   { return __builtin_isnan(x); }
inline float sign(float x)                    { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }

template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }
template <typename T> inline T abs(T x)      { return x < T(0) ? T(-x) : x; }
template <typename T> inline T clamp(T x, T low, T high)        { return min(max(x, low), high); }
template <typename T> inline T select(T a, T b, bool second)    { return second ? b : a; }
template <typename T> inline T popcount(T x)                    { return T(__builtin_popcountl(ulong(x))); }
template <typename T, int N> inline T dot(const vec<T, N> & a, const vec<T, N> & b) {
    T s = a.v[0]*b.v[0];
    for (int i = 1; i < N; ++i) {
        s += a.v[i]*b.v[i];
    }
    return s;
}

} // namespace metal
