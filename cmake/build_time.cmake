# Shortens the build where that costs no speed: upstream compiles hundreds of small files
# that each read the same large headers, and optimises code that parses options and HTTP.

# kvq_unify(<target> <batch> <files compiled alone...>): compile the target's other files
# in batches, small enough to keep several cores busy.
function(kvq_unify target batch)
    set_property(TARGET ${target} PROPERTY UNITY_BUILD ON)
    set_property(TARGET ${target} PROPERTY UNITY_BUILD_BATCH_SIZE ${batch})
    get_target_property(folder ${target} SOURCE_DIR)
    list(TRANSFORM ARGN PREPEND ${folder}/)
    if(ARGN)
        set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target}
            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
endfunction()

# json.cpp and value.cpp specialise what others instantiate; arg.cpp is large enough by itself.
kvq_unify(llama-common 6 arg.cpp json.cpp jinja/value.cpp)
kvq_unify(server-context 3)
# The image and audio libraries in these define macros freely.
kvq_unify(mtmd 8 mtmd.cpp mtmd-audio.cpp mtmd-image.cpp mtmd-helper.cpp mtmd-helper-gen.cpp clip.cpp)

if(NOT MSVC)
    target_compile_options(cpp-httplib PRIVATE -O1)
    foreach(target server-context llama-server-impl llama-cli-impl)
        target_compile_options(${target} PRIVATE -O2)
    endforeach()
    get_target_property(folder llama-common SOURCE_DIR)
    set_property(SOURCE ${folder}/arg.cpp TARGET_DIRECTORY llama-common APPEND PROPERTY COMPILE_OPTIONS -O1)
endif()
