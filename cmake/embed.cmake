# Puts files into a static library as bytes.
#
# jattn_embed(TARGET name SYMBOL prefix FILES file...)
#   File i is found between the symbols <prefix>_<i>_begin and <prefix>_<i>_end; a zero byte follows it.
#   The library is built again when a file changes.

function(jattn_embed)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "TARGET;SYMBOL" "FILES")
    set(text ".section .rodata\n")
    set(index 0)
    foreach(file IN LISTS arg_FILES)
        set(name "${arg_SYMBOL}_${index}")
        string(
            APPEND text
            ".balign 64\n.global ${name}_begin\n.global ${name}_end\n"
        )
        string(APPEND text ".hidden ${name}_begin\n.hidden ${name}_end\n")
        string(
            APPEND text
            "${name}_begin:\n.incbin \"${file}\"\n${name}_end:\n.byte 0\n"
        )
        math(EXPR index "${index} + 1")
    endforeach()
    string(APPEND text ".section .note.GNU-stack,\"\",%progbits\n")
    set(assembly "${CMAKE_CURRENT_BINARY_DIR}/${arg_SYMBOL}.S")
    file(CONFIGURE OUTPUT "${assembly}" CONTENT "${text}" @ONLY)
    set_source_files_properties(
        "${assembly}"
        PROPERTIES OBJECT_DEPENDS "${arg_FILES}"
    )
    target_sources(${arg_TARGET} PRIVATE "${assembly}")
endfunction()
