# Writes a C++ file with the Metal sources as text: every library is one text, its headers in front.
#   cmake -DOUT=<file.cpp> -P embed.cmake
# Metal compiles them on the machine that runs them, as it does upstream's.

function(kvq_metal_embed out)
    set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
    set(text "#include \"kvq-metal-source.h\"\n\nconst char * const kvq_metal_sources[KVQ_METAL_LIBRARIES] = {\n")
    foreach(library rows decode prefill)
        set(source "#include <metal_stdlib>\nusing namespace metal;\n")
        foreach(name kvq-metal-impl.h kvq-metal-tables.h kvq-codec.h kvq-attn.h kvq-${library}.metal)
            if(library STREQUAL "rows" AND name STREQUAL "kvq-attn.h")
                continue()
            endif()
            set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${folder}/${name})
            file(READ ${folder}/${name} part)
            string(REGEX REPLACE "#pragma once\n|#include \"[^\"]*\"\n" "" part "${part}")
            string(APPEND source "${part}")
        endforeach()
        string(APPEND text "R\"kvq(${source})kvq\",\n")
    endforeach()
    file(CONFIGURE OUTPUT ${out} CONTENT "${text}};\n" @ONLY)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
    kvq_metal_embed(${OUT})
endif()
