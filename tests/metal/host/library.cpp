// Loading of translated kernels: a library is opened anew, from a copy of its file, for every set of function constants.
#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <vector>

namespace metal_host {

static const constants * being_set;

static const metal_host_entry * open_library(const std::string & path, const constants & values) {
    being_set = &values;
    void * library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    being_set = nullptr;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return (const metal_host_entry *) dlsym(library, "metal_host_entries");
}

static const metal_host_entry * entry_of(const metal_host_entry * e, const char * name) {
    for (; e->name; ++e) {
        if (!strcmp(e->name, name)) {
            return e;
        }
    }
    return nullptr;
}

const metal_host_entry * find_entry(const char * name, const constants & values) {
    static std::vector<std::pair<std::string, const metal_host_entry *>> libraries;
    static std::map<std::pair<std::string, constants>, const metal_host_entry *> specialised;
    if (libraries.empty()) {
        const char * paths = getenv("METAL_HOST_LIBRARIES");
        std::stringstream list(paths ? paths : "");
        for (std::string path; std::getline(list, path, ':');) {
            libraries.push_back({ path, open_library(path, {}) });
        }
    }
    for (const auto & library : libraries) {
        if (!entry_of(library.second, name)) {
            continue;
        }
        const metal_host_entry *& e = specialised[{ library.first, values }];
        if (!e) {
            // another file is another library to the loader
            char copy[] = "/tmp/metal-host-XXXXXX";
            close(mkstemp(copy));
            std::ofstream(copy, std::ios::binary) << std::ifstream(library.first, std::ios::binary).rdbuf();
            e = open_library(copy, values);
            unlink(copy);
        }
        return entry_of(e, name);
    }
    return nullptr;
}

} // namespace metal_host

int metal_host_function_constant(int index) {
    const auto * values = metal_host::being_set;
    const auto found = values->find(index);
    return found != values->end() ? found->second : 0x5A5A5A5A;
}
