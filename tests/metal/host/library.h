// Translated kernels as shared libraries, loaded once for every set of function constants.
#pragma once

#include "lane.h"

#include <map>
#include <string>

namespace metal_host {

typedef std::map<int, int> constants;           // values by index

// Entry point of that name in one of the libraries of METAL_HOST_LIBRARIES (paths, separated by colons), specialised; null
// where there is none. Constants without a value read as garbage, since a kernel must not use them.
const metal_host_entry * find_entry(const char * name, const constants & values);

} // namespace metal_host
