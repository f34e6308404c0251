# What is compiled into the library, and with BLOBSTORE_PYTHON into the module: a CycloneDX document that is installed
# with it. `make dist` adds the hashes of what is published and the packages that pip installs with it.

# The three numbers of a version that a header defines.
function(blobstore_header_version result header prefix last)
  set(version "")
  foreach(part MAJOR MINOR ${last})
    file(STRINGS ${header} line REGEX "^#define ${prefix}_${part} +[0-9]+")
    string(REGEX REPLACE "^#define [A-Z_]+ +([0-9]+).*" "\\1" number "${line}")
    list(APPEND version ${number})
  endforeach()
  list(JOIN version . version)
  set(${result} ${version} PARENT_SCOPE)
endfunction()

function(blobstore_sbom output)
  set(name blobstore_runtime)
  set(dependencies "\"xxhash\", \"executorch\"")
  set(xxhash ${PROJECT_SOURCE_DIR}/third_party/xxhash/xxhash.h)
  blobstore_header_version(xxhash_VERSION ${xxhash} XXH_VERSION RELEASE)
  set(xxhash_TAG "@v${xxhash_VERSION}")
  file(SHA256 ${xxhash} xxhash_SHA256)
  set(zstd_component "")
  if(BLOBSTORE_ZSTD STREQUAL "bundled")
    set(zstd ${PROJECT_SOURCE_DIR}/third_party/zstd/zstddeclib.c)
    blobstore_header_version(zstd_VERSION ${zstd} ZSTD_VERSION RELEASE)
    file(SHA256 ${zstd} zstd_SHA256)
    set(dependencies "${dependencies}, \"zstd\"")
    set(
      zstd_component
      ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"zstd\",
      \"name\": \"zstd\",
      \"version\": \"${zstd_VERSION}\",
      \"description\": \"compiled in: third_party/zstd/zstddeclib.c\",
      \"licenses\": [{\"license\": {\"id\": \"BSD-3-Clause\"}}],
      \"purl\": \"pkg:github/facebook/zstd@v${zstd_VERSION}\",
      \"hashes\": [{\"alg\": \"SHA-256\", \"content\": \"${zstd_SHA256}\"}]
    }"
    )
  endif()
  if(executorch_VERSION)
    set(executorch_TAG "@${executorch_VERSION}")
  else() # a build of ExecuTorch's sources does not say
    set(executorch_VERSION unknown)
  endif()
  set(executorch_USE "linked; of its headers, templates and inline functions are compiled in")
  if(BLOBSTORE_PYTHON)
    set(name executorch-blobstore-runtime)
    set(executorch_USE "four of its libraries are in the wheel: the runtime, the thread pool, the kernels and XNNPACK")
    set(dependencies "${dependencies}, \"nanobind\", \"robin-map\"")
    blobstore_header_version(
      robin_map_VERSION ${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h TSL_RH_VERSION PATCH
    )
    set(
      python_components
      ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"nanobind\",
      \"name\": \"nanobind\",
      \"version\": \"${nanobind_VERSION}\",
      \"description\": \"compiled in\",
      \"licenses\": [{\"license\": {\"id\": \"BSD-3-Clause\"}}],
      \"purl\": \"pkg:pypi/nanobind@${nanobind_VERSION}\"
    },
    {
      \"type\": \"library\",
      \"bom-ref\": \"robin-map\",
      \"name\": \"robin-map\",
      \"version\": \"${robin_map_VERSION}\",
      \"description\": \"compiled in, as a part of nanobind\",
      \"licenses\": [{\"license\": {\"id\": \"MIT\"}}],
      \"purl\": \"pkg:github/Tessil/robin-map@v${robin_map_VERSION}\"
    }"
    )
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/sbom.cdx.json.in ${output} @ONLY)
endfunction()
