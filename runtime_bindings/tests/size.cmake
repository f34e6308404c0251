# The shared library without symbols and debugging information takes at most 600 KB, see docs/platforms.md.
set(limit 614400)
set(stripped ${LIBRARY}.stripped)
execute_process(COMMAND ${STRIP} -o ${stripped} ${LIBRARY} COMMAND_ERROR_IS_FATAL ANY)
file(SIZE ${stripped} size)
message("${LIBRARY}: ${size} bytes when stripped, at most ${limit}")
if(size GREATER limit)
  message(FATAL_ERROR "the library is too large")
endif()
