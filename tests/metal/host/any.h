// Untyped arguments of an entry point that take the type of the parameter they meet.
#pragma once

#include "lane.h"
#include "types.h"

struct metal_host_any {
    void * p;
    template <typename T> operator T *() const { return (T *) p; }
};
struct metal_host_any_object {
    void * p;
    template <typename T> operator const T &() const { return *(const T *) p; }
};

// a position as uint, uint3, ushort2, ...
template <typename T> struct metal_host_position_as { static T make(const metal_host_position & p) { return T(p.x); } };
template <typename T> struct metal_host_position_as<metal::vec<T, 2>> { static metal::vec<T, 2> make(const metal_host_position & p) { return metal::vec<T, 2>(T(p.x), T(p.y)); } };
template <typename T> struct metal_host_position_as<metal::vec<T, 3>> { static metal::vec<T, 3> make(const metal_host_position & p) { return metal::vec<T, 3>(T(p.x), T(p.y), T(p.z)); } };
template <typename T> T metal_host_as(const metal_host_position & p) { return metal_host_position_as<T>::make(p); }
