# macOS 14 on Apple silicon with zig, from any system. The environment names a folder with its commands: BLOBSTORE_ZIG.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "") # zig has one
set(CMAKE_CXX_COMPILER $ENV{BLOBSTORE_ZIG}/c++)
set(CMAKE_CXX_FLAGS_INIT "-target aarch64-macos.14.0")
set(CMAKE_AR $ENV{BLOBSTORE_ZIG}/ar)
set(CMAKE_RANLIB $ENV{BLOBSTORE_ZIG}/ranlib)
# Xcode's tools for what is installed; nothing here needs them.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_STRIP true)
