# One wheel tree: llama_cpp/ (bindings), llama_cpp/lib (libraries), pykvq/bin (executables).

if(SKBUILD)
    set(site ${SKBUILD_PLATLIB_DIR})
else()
    # Relative, so that cmake --install --prefix decides.
    set(site .)
endif()

set(executables llama-server llama-cli llama-bench llama-batched-bench llama-perplexity llama-quantize)
if(TARGET ggml-rpc-server)
    list(APPEND executables ggml-rpc-server)
endif()
set(libraries llama mtmd llama-common ggml ggml-base)
foreach(tool IN LISTS executables)
    if(TARGET ${tool}-impl)
        list(APPEND libraries ${tool}-impl)
    endif()
endforeach()
foreach(backend blas cann cpu cuda hip metal musa opencl rpc sycl vulkan webgpu zdnn)
    if(TARGET ggml-${backend})
        list(APPEND libraries ggml-${backend})
    endif()
endforeach()

if(APPLE)
    set(origin @loader_path)
else()
    set(origin $ORIGIN)
endif()

# A wheel cannot hold symlinks, so libraries carry no version: one file under one name.
foreach(library IN LISTS libraries)
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
    set_property(TARGET ${library} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${library} PROPERTY PRIVATE_HEADER)
    set_property(TARGET ${library} PROPERTY INSTALL_RPATH ${origin})
endforeach()
set_property(TARGET ${executables} PROPERTY INSTALL_RPATH ${origin}/../../llama_cpp/lib)

# Finds CUDA's and conda's libraries where the linker found them.
set_property(TARGET ${libraries} ${executables} PROPERTY INSTALL_RPATH_USE_LINK_PATH ON)

add_custom_target(pykvq_all ALL)
add_dependencies(pykvq_all ${libraries} ${executables})

install(TARGETS ${libraries}
    LIBRARY DESTINATION ${site}/llama_cpp/lib
    RUNTIME DESTINATION ${site}/llama_cpp/lib
    ARCHIVE DESTINATION ${site}/llama_cpp/lib EXCLUDE_FROM_ALL)
install(TARGETS ${executables} RUNTIME DESTINATION ${site}/pykvq/bin)

install(DIRECTORY ${UPSTREAM_DIR}/llama_cpp DESTINATION ${site}
    PATTERN __pycache__ EXCLUDE PATTERN lib EXCLUDE)
install(FILES ${UPSTREAM_DIR}/LICENSE.md DESTINATION ${site}/llama_cpp)
install(FILES ${LLAMA_CPP_DIR}/LICENSE DESTINATION ${site}/llama_cpp/lib)
