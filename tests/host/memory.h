// What the memories of both host machines share: address space for a device, and the list of faults.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <set>
#include <string>
#include <utility>

namespace host {

inline void * reserve(const size_t bytes) {
    void * p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "no address space for device memory\n");
        exit(2);
    }
    return p;
}

class fault_list {
    std::set<std::pair<std::string, std::string>> told;

public:
    int count = 0;

    // prints each kind of fault of a kernel once; says: what else the line tells, made only then
    template <typename F> void add(const std::string & kernel, const char * kind, const F & says) {
        count++;
        if (told.size() < 50 && told.insert({ kernel, kind }).second) {
            printf("FAULT: %s: %s%s\n", kernel.c_str(), kind, std::string(says()).c_str());
            fflush(stdout);
        }
    }
};

} // namespace host
