# The same with Clang and LLVM's linker (clang, lld), which the applications of phones are built with. Headers and
# libraries are those of the cross compiler.
include(${CMAKE_CURRENT_LIST_DIR}/aarch64-linux-gnu.cmake)
set(CMAKE_CXX_COMPILER clang++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
set(CMAKE_LINKER_TYPE LLD)
