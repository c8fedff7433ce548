# Fetches, verifies and patches upstream (tools/vendor.py), then adds it with our sources attached.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

file(STRINGS patches/UPSTREAM upstream_pin)
foreach(line IN LISTS upstream_pin)
    if(line MATCHES "^([a-z0-9_]+) = \"(.*)\"$")
        set(UPSTREAM_${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
    endif()
endforeach()

if(PYKVQ_UPSTREAM_DIR)
    set(UPSTREAM_DIR ${PYKVQ_UPSTREAM_DIR})
else()
    # A mirror in the build folder keeps one path and old time stamps across patch sets,
    # so that an edited patch recompiles only the files that it touches.
    set(UPSTREAM_DIR ${CMAKE_BINARY_DIR}/upstream)
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/vendor.py --sync ${UPSTREAM_DIR}
        RESULT_VARIABLE vendor_result OUTPUT_QUIET)
    if(NOT vendor_result EQUAL 0)
        message(FATAL_ERROR "tools/vendor.py could not provide the upstream sources (its message is above)")
    endif()
    file(GLOB patch_files CONFIGURE_DEPENDS patches/*.patch)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        ${CMAKE_SOURCE_DIR}/patches/UPSTREAM ${CMAKE_SOURCE_DIR}/patches/series ${patch_files}
        ${CMAKE_SOURCE_DIR}/tools/vendor.py)
endif()
message(STATUS "pykvq ${PROJECT_VERSION}: ${UPSTREAM_package} ${UPSTREAM_version} in ${UPSTREAM_DIR}")

set(LLAMA_CPP_DIR ${UPSTREAM_DIR}/vendor/llama.cpp)

# Upstream's answers to questions that a package must settle. Normal variables, so
# that CMAKE_ARGS still decides everything else (GGML_CUDA, GGML_METAL, GGML_NATIVE, ...).
set(BUILD_SHARED_LIBS ON)
set(LLAMA_BUILD_COMMON ON)
set(LLAMA_BUILD_TOOLS ON)
set(LLAMA_BUILD_SERVER ON)
set(LLAMA_BUILD_TESTS OFF)
set(LLAMA_BUILD_EXAMPLES OFF)
set(LLAMA_BUILD_APP OFF)
set(LLAMA_TOOLS_INSTALL OFF)
set(LLAMA_BUILD_UI ${PYKVQ_BUILD_UI})
set(LLAMA_USE_PREBUILT_UI OFF)
set(GGML_METAL_EMBED_LIBRARY ON)
# A model over several hosts needs no other build; an option, so that CMAKE_ARGS can leave it out.
option(GGML_RPC "the RPC backend and ggml-rpc-server" ON)
# Would link whatever libibverbs the building machine has.
option(GGML_RPC_RDMA "RDMA transport of the RPC backend" OFF)
# Its switches over ggml types would warn of every type of ours; our sources set their own.
set(LLAMA_ALL_WARNINGS OFF)
# Upstream asks git for these, and would find the history of this repository.
set(ENV{GIT_CEILING_DIRECTORIES} ${UPSTREAM_DIR})
set(LLAMA_BUILD_COMMIT ${UPSTREAM_llama_cpp_commit})
set(LLAMA_BUILD_NUMBER 0)

# EXCLUDE_FROM_ALL: only what the install rules name is built, and upstream's own are not run.
add_subdirectory(${LLAMA_CPP_DIR} llama.cpp EXCLUDE_FROM_ALL)

include(cmake/build_time.cmake)

if(TARGET ggml-cuda)
    enable_language(CUDA)        # upstream enabled it for its own folder
endif()
include(ggml_kernels/kvq.cmake)
kvq_attach(${LLAMA_CPP_DIR})
