// Scalars, vectors and matrices of the Metal Shading Language (specification, chapter 2) with its sizes, alignments and roundings.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned char  uchar;
typedef unsigned short ushort;
typedef unsigned int   uint;
typedef unsigned long  ulong;

namespace metal {

template <typename A, typename B> struct is_same       { static constexpr bool value = false; };
template <typename A>             struct is_same<A, A> { static constexpr bool value = true;  };

template <typename T> struct is_number { static constexpr bool value = false; };
#define METAL_NUMBER(T, F) template <> struct is_number<T> { static constexpr bool value = true; static constexpr bool is_float = F; };
METAL_NUMBER(bool, false)   METAL_NUMBER(char, false)  METAL_NUMBER(int8_t, false) METAL_NUMBER(uint8_t, false) METAL_NUMBER(short, false)
METAL_NUMBER(ushort, false) METAL_NUMBER(int, false)   METAL_NUMBER(uint, false)   METAL_NUMBER(long, false)    METAL_NUMBER(ulong, false)
METAL_NUMBER(float, true)   METAL_NUMBER(double, true)
#undef METAL_NUMBER

template <bool B, typename T> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F> struct conditional { typedef T type; };
template <typename T, typename F> struct conditional<false, T, F> { typedef F type; };

} // namespace metal

// 16-bit float: operations between halves and with integers round to half, with a float they give a float
struct half {
    __fp16 v;
    half() = default;
    constexpr half(float x) : v((__fp16) x) {}
    constexpr half(double x) : v((__fp16) x) {}
    template <typename T, typename = metal::enable_if_t<metal::is_number<T>::value && !metal::is_number<T>::is_float, void>>
    constexpr half(T x) : v((__fp16) (float) x) {}
    constexpr operator float() const { return (float) v; }
    constexpr half operator-() const { return half(-(float) v); }
};
#define HALF_OPERATOR(op) \
    inline half operator op(half a, half b) { return half((float) a op (float) b); } \
    template <typename T> inline metal::enable_if_t<metal::is_number<T>::value, typename metal::conditional<metal::is_number<T>::is_float, float, half>::type> \
    operator op(half a, T b) { return (float) a op (float) b; } \
    template <typename T> inline metal::enable_if_t<metal::is_number<T>::value, typename metal::conditional<metal::is_number<T>::is_float, float, half>::type> \
    operator op(T a, half b) { return (float) a op (float) b; } \
    template <typename T> inline half & operator op##=(half & a, T b) { return a = half((float) a op (float) b); }
HALF_OPERATOR(+) HALF_OPERATOR(-) HALF_OPERATOR(*) HALF_OPERATOR(/)
#undef HALF_OPERATOR
constexpr half operator""h(long double x)        { return half((float) x); }
constexpr half operator""h(unsigned long long x) { return half((float) x); }

#define MAXHALF  half(65504.0f)
#define FLT_MAX  __FLT_MAX__
#define INFINITY __builtin_inff()
#define M_PI_F   3.14159265358979323846f

namespace metal {

template <> struct is_number<half> { static constexpr bool value = true; static constexpr bool is_float = true; };

template <typename T, int N> struct components;
template <typename T> struct components<T, 2> { union { T v[2]; struct { T x, y; }; }; };
template <typename T> struct components<T, 3> { union { T v[4]; struct { T x, y, z; }; }; };      // the size of four
template <typename T> struct components<T, 4> { union { T v[4]; struct { T x, y, z, w; }; }; };

template <typename T, int N> struct alignas(sizeof(T)*(N == 3 ? 4 : N)) vec : components<T, N> {
    vec() = default;
    template <typename U, typename = enable_if_t<is_number<U>::value, void>> vec(U s) { for (int i = 0; i < N; ++i) { this->v[i] = T(s); } }
    vec(T a, T b)           { static_assert(N == 2, "components"); this->v[0] = a; this->v[1] = b; }
    vec(T a, T b, T c)      { static_assert(N == 3, "components"); this->v[0] = a; this->v[1] = b; this->v[2] = c; }
    vec(T a, T b, T c, T d) { static_assert(N == 4, "components"); this->v[0] = a; this->v[1] = b; this->v[2] = c; this->v[3] = d; }
    template <typename U> explicit vec(const vec<U, N> & o) { for (int i = 0; i < N; ++i) { this->v[i] = T(o.v[i]); } }
    T       & operator[](int i)       { return this->v[i]; }
    const T & operator[](int i) const { return this->v[i]; }
    vec operator-() const { vec r; for (int i = 0; i < N; ++i) { r.v[i] = -this->v[i]; } return r; }
};
#define VEC_OPERATOR(op) \
    template <typename T, int N> inline vec<T, N> operator op(const vec<T, N> & a, const vec<T, N> & b) { vec<T, N> r; for (int i = 0; i < N; ++i) { r.v[i] = T(a.v[i] op b.v[i]); } return r; } \
    template <typename T, int N, typename U> inline enable_if_t<is_number<U>::value, vec<T, N>> operator op(const vec<T, N> & a, U b) { return a op vec<T, N>(b); } \
    template <typename T, int N, typename U> inline enable_if_t<is_number<U>::value, vec<T, N>> operator op(U a, const vec<T, N> & b) { return vec<T, N>(a) op b; } \
    template <typename T, int N, typename U> inline vec<T, N> & operator op##=(vec<T, N> & a, const U & b) { return a = a op b; }
VEC_OPERATOR(+) VEC_OPERATOR(-) VEC_OPERATOR(*) VEC_OPERATOR(/)
#undef VEC_OPERATOR

// C columns of R values
template <typename T, int C, int R> struct matrix {
    vec<T, R> column[C];
    matrix() = default;
    template <typename U> explicit matrix(const matrix<U, C, R> & o) { for (int i = 0; i < C; ++i) { column[i] = vec<T, R>(o.column[i]); } }
    vec<T, R>       & operator[](int i)       { return column[i]; }
    const vec<T, R> & operator[](int i) const { return column[i]; }
};

} // namespace metal

#define METAL_VECTORS(T) typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;
METAL_VECTORS(half) METAL_VECTORS(float) METAL_VECTORS(char) METAL_VECTORS(uchar) METAL_VECTORS(short) METAL_VECTORS(ushort) METAL_VECTORS(int) METAL_VECTORS(uint)
#undef METAL_VECTORS
struct packed_char4 { char v[4]; operator float4() const { return float4(v[0], v[1], v[2], v[3]); } };
typedef metal::matrix<half,  2, 4> half2x4;
typedef metal::matrix<half,  4, 4> half4x4;
typedef metal::matrix<float, 2, 4> float2x4;
typedef metal::matrix<float, 4, 4> float4x4;
