# Attaches this folder's sources to upstream's targets, so that patches hold call sites only.

set(KVQ_DIR ${CMAKE_CURRENT_LIST_DIR})

# kvq_sources(<target> GLOBS <patterns...> [INCLUDES <private include folders...>])
function(kvq_sources target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "GLOBS;INCLUDES")
    list(TRANSFORM arg_GLOBS PREPEND ${KVQ_DIR}/)
    file(GLOB sources CONFIGURE_DEPENDS ${arg_GLOBS})
    if(sources)
        target_sources(${target} PRIVATE ${sources})
        if(NOT MSVC AND NOT target STREQUAL ggml-cuda)
            set_source_files_properties(${sources} TARGET_DIRECTORY ${target}
                PROPERTIES COMPILE_OPTIONS "-Wall;-Wextra")
        endif()
    endif()
    if(arg_INCLUDES)
        target_include_directories(${target} PRIVATE ${arg_INCLUDES})
    endif()
endfunction()

# Warpgroup products exist for sm_90a, which upstream's list of architectures does not name: a target of its own, where
# that list has compute capability 9.0.
function(kvq_hopper)
    get_target_property(architectures ggml-cuda CUDA_ARCHITECTURES)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0 OR NOT "${architectures};${CMAKE_CUDA_ARCHITECTURES_NATIVE}" MATCHES "90|all")
        return()
    endif()
    add_library(kvq-hopper OBJECT ${KVQ_DIR}/cuda/hopper/kvq-hopper.cu)
    set_target_properties(kvq-hopper PROPERTIES CUDA_ARCHITECTURES 90a-real CUDA_STANDARD 17 POSITION_INDEPENDENT_CODE ON)
    target_compile_options(kvq-hopper PRIVATE -use_fast_math)
    target_include_directories(kvq-hopper PRIVATE ${KVQ_DIR}/cuda ${KVQ_DIR}/include)
    target_sources(ggml-cuda PRIVATE $<TARGET_OBJECTS:kvq-hopper>)
    set_property(SOURCE ${KVQ_DIR}/cuda/kvq-kernels.cu TARGET_DIRECTORY ggml-cuda APPEND PROPERTY COMPILE_DEFINITIONS KVQ_HOPPER)
endfunction()

# kvq_attach(<llama.cpp source folder>): call after add_subdirectory(llama.cpp).
function(kvq_attach upstream)
    # The patched ggml.h includes kvq-types.h, so every user of ggml needs this folder.
    target_include_directories(ggml-base PUBLIC ${KVQ_DIR}/include)

    kvq_sources(ggml-base GLOBS base/*.c)
    kvq_sources(ggml-cpu GLOBS cpu/*.c cpu/*.cpp INCLUDES ${KVQ_DIR}/cpu)
    if(TARGET ggml-cuda)
        kvq_sources(ggml-cuda GLOBS cuda/*.cu cuda/instances/*.cu INCLUDES ${KVQ_DIR}/cuda ${upstream}/ggml/src/ggml-cuda)
        kvq_hopper()
    endif()

    if(TARGET ggml-metal)
        # compiled on the machine that runs them, from text in the library
        include(${KVQ_DIR}/metal/embed.cmake)
        kvq_metal_embed(${CMAKE_CURRENT_BINARY_DIR}/kvq-metal-source.cpp)
        target_sources(ggml-metal PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/kvq-metal-source.cpp)
        kvq_sources(ggml-metal GLOBS metal/*.cpp INCLUDES ${KVQ_DIR}/metal ${upstream}/ggml/src/ggml-metal)
    endif()

    if(TARGET llama)
        kvq_sources(llama GLOBS llama/*.cpp INCLUDES ${KVQ_DIR}/llama ${upstream}/src)
        # Upstream builds its own model files as one unit; ours must not join it.
        file(GLOB llama_sources CONFIGURE_DEPENDS ${KVQ_DIR}/llama/*.cpp)
        set_source_files_properties(${llama_sources} TARGET_DIRECTORY llama
            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()

    # Upstream's AMX aborts with MLA models and damages the heap with hybrid ones, and GCC 12 makes an illegal instruction of it (docs/known-issues.md).
    if(NOT MSVC AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endif()

    # The reference defines the codec bit for bit, and a fused multiply-add rounds differently.
    if(NOT MSVC)
        set_property(SOURCE ${KVQ_DIR}/base/kvq-reference.c ${KVQ_DIR}/base/kvq-tiered.c TARGET_DIRECTORY ggml-base
            APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
        set_property(SOURCE ${KVQ_DIR}/cpu/kvq-quantize.cpp TARGET_DIRECTORY ggml-cpu
            APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
    endif()
endfunction()
