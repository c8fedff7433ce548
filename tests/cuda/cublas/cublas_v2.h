// What upstream's common.cuh needs of cuBLAS to compile, for machines whose toolkit lacks it: the wheel that carries the
// real header weighs 421 MB. Declarations only; nothing here can be linked.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

typedef struct cublasContext * cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum { CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;

const char *   cublasGetStatusString(cublasStatus_t status);
cublasStatus_t cublasCreate(cublasHandle_t * handle);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void * workspace, size_t bytes);
