# cmake -DLOG=file -P run_logged.cmake -- command...
# Runs the command, keeps what it printed in the file, and repeats it on the screen if the command failed.

set(command "")
set(collecting FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(index RANGE ${last})
    if(collecting)
        list(APPEND command "${CMAKE_ARGV${index}}")
    elseif(CMAKE_ARGV${index} STREQUAL "--")
        set(collecting TRUE)
    endif()
endforeach()
execute_process(
    COMMAND ${command}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE printed
    ERROR_VARIABLE printed
)
file(WRITE "${LOG}" "${printed}")
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${printed}")
endif()
