// The names and values of NCCL's interface that are used here. Its own header includes others that torch's packages
// leave out.
#pragma once
#include <climits>
#include <cstddef>

struct ncclComm;
using ncclComm_t = ncclComm*;
struct ncclUniqueId { char internal[128]; };
struct ncclConfig_t;

enum ncclResult_t {
  ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage,
  ncclRemoteError, ncclInProgress, ncclNumResults
};
// Reductions from ncclNumOps on are those of ncclRedOpCreatePreMulSum.
enum ncclRedOp_t : int { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };
enum ncclDataType_t {
  ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64,
  ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclNumTypes
};
enum ncclScalarResidence_t { ncclScalarDevice, ncclScalarHostImmediate };
constexpr int kVersion = 22907, kNoColor = -1;
