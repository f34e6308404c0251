#include "codec/frames.h"

/* The functions that zstd exports are local to this file; those that its own files have in common get other names. */
#define ZSTDLIB_VISIBLE static
#define ZSTDERRORLIB_VISIBLE static
#define ERR_getErrorString blobstore_ERR_getErrorString
#define FSE_buildDTable_wksp blobstore_FSE_buildDTable_wksp
#define FSE_decompress_wksp_bmi2 blobstore_FSE_decompress_wksp_bmi2
#define FSE_readNCount blobstore_FSE_readNCount
#define FSE_readNCount_bmi2 blobstore_FSE_readNCount_bmi2
#define FSE_versionNumber blobstore_FSE_versionNumber
#define HUF_decompress1X1_DCtx_wksp blobstore_HUF_decompress1X1_DCtx_wksp
#define HUF_decompress1X2_DCtx_wksp blobstore_HUF_decompress1X2_DCtx_wksp
#define HUF_decompress1X_DCtx_wksp blobstore_HUF_decompress1X_DCtx_wksp
#define HUF_decompress1X_usingDTable blobstore_HUF_decompress1X_usingDTable
#define HUF_decompress4X_hufOnly_wksp blobstore_HUF_decompress4X_hufOnly_wksp
#define HUF_decompress4X_usingDTable blobstore_HUF_decompress4X_usingDTable
#define HUF_readDTableX1_wksp blobstore_HUF_readDTableX1_wksp
#define HUF_readDTableX2_wksp blobstore_HUF_readDTableX2_wksp
#define HUF_readStats blobstore_HUF_readStats
#define HUF_readStats_wksp blobstore_HUF_readStats_wksp
#define HUF_selectDecoder blobstore_HUF_selectDecoder
#define ZSTD_DDict_dictContent blobstore_ZSTD_DDict_dictContent
#define ZSTD_DDict_dictSize blobstore_ZSTD_DDict_dictSize
#define ZSTD_buildFSETable blobstore_ZSTD_buildFSETable
#define ZSTD_checkContinuity blobstore_ZSTD_checkContinuity
#define ZSTD_copyDDictParameters blobstore_ZSTD_copyDDictParameters
#define ZSTD_customCalloc blobstore_ZSTD_customCalloc
#define ZSTD_customFree blobstore_ZSTD_customFree
#define ZSTD_customMalloc blobstore_ZSTD_customMalloc
#define ZSTD_decodeLiteralsBlock blobstore_ZSTD_decodeLiteralsBlock
#define ZSTD_decodeSeqHeaders blobstore_ZSTD_decodeSeqHeaders
#define ZSTD_decompressBlock_internal blobstore_ZSTD_decompressBlock_internal
#define ZSTD_getcBlockSize blobstore_ZSTD_getcBlockSize
#define ZSTD_loadDEntropy blobstore_ZSTD_loadDEntropy
#define g_debuglevel blobstore_g_debuglevel
#define FSE_isError blobstore_FSE_isError
#define FSE_getErrorName blobstore_FSE_getErrorName
#define HUF_isError blobstore_HUF_isError
#define HUF_getErrorName blobstore_HUF_getErrorName
/* The smaller ones of several decoders for the same bytes. */
#define HUF_FORCE_DECOMPRESS_X1
#define ZSTD_FORCE_DECOMPRESS_SEQUENCES_SHORT
#pragma GCC diagnostic ignored "-Wunused-function" /* what compresses is declared and left out */
#include "zstddeclib.c"

int blobstore_decode_frame(void* out, size_t size, const void* stored, size_t stored_size) {
  /* The head of a frame says how much it holds, so nothing beyond that is written. */
  return ZSTD_getFrameContentSize(stored, stored_size) == size &&
      ZSTD_findFrameCompressedSize(stored, stored_size) == stored_size &&
      ZSTD_decompress(out, size, stored, stored_size) == size;
}
