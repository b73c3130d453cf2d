// libcuda.so.1: the part of the driver that torch, triton and the expandable segments of torch's allocator call, over
// the phantom device. What is not here is generated as a function that says success.
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

using namespace phantom;

#undef cuGetProcAddress
#undef cuDeviceTotalMem
#undef cuMemGetInfo
#undef cuMemAlloc
#undef cuMemFree
#undef cuLinkCreate
#undef cuLinkAddData
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuDevicePrimaryCtxSetFlags
#undef cuStreamDestroy
#undef cuEventDestroy
#undef cuEventElapsedTime
#undef cuMemHostGetDevicePointer
#undef cuMemcpyHtoD
#undef cuMemcpyDtoH
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyDtoDAsync
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuModuleGetGlobal
#undef cuDeviceGetUuid
#undef cuStreamGetCaptureInfo
#undef cuMemHostRegister

namespace {

// The primary context of each device is the only one.
constexpr uintptr_t kFirstContext = 0x7000;
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(kFirstContext + device); }
CUcontext current() { return context_of(current_device()); }
void make_current(CUcontext context) {
  if (context) current_device() = static_cast<int>(reinterpret_cast<uintptr_t>(context) - kFirstContext);
}
thread_local std::vector<CUcontext> contexts;
void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
Stream* stream_at(CUstream stream) { return stream_of(stream, current_device()); }
Event* event_at(CUevent event) { return reinterpret_cast<Event*>(event); }

// A kernel is its name; so is a module.
struct Names {
  std::mutex lock;
  std::map<std::string, char*> found;
};
CUfunction named(const char* name) {
  static auto* names = new Names;
  std::lock_guard guard(names->lock);
  auto& found = names->found[name];
  if (!found) found = strdup(name);
  return reinterpret_cast<CUfunction>(found);
}

}  // namespace

// The runtime's table of attributes has the driver's numbers.
extern "C" int cudaDeviceGetAttribute(int* value, int which, int device);

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { *count = num_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= num_devices()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) { snprintf(name, length, "%s", card().name); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { *bytes = card().total_bytes; return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  memcpy(uuid->bytes, "phantom-device-", 15);
  uuid->bytes[15] = static_cast<char>('0' + device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  using Function = int (*)(int*, int, int);
  static const auto ask = reinterpret_cast<Function>(
      dlsym(dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD), "cudaDeviceGetAttribute"));
  *value = 0;
  if (which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) *value = 1;
  else if (ask) ask(value, static_cast<int>(which), device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { *context = context_of(device); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { *context = current(); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { make_current(context); return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(current());
  make_current(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (context) *context = current();
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  make_current(contexts.back());
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) { *device = current_device(); return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { finish_all(); return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "phantom driver error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR_PHANTOM"; return CUDA_SUCCESS; }
// The driver's own tables, which NVIDIA does not document: there are none here.
CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_SUPPORTED; }

// -- memory -----------------------------------------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = free_bytes(current_device());
  *total = card().total_bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  void* found = allocate(current_device(), bytes);
  *address = reinterpret_cast<CUdeviceptr>(found);
  return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree_v2(CUdeviceptr address) { return free_memory(at(address)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned) {
  *address = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr address) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(data) = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(data) = context_of(std::max(device_at(at(address)), 0)); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = device_at(at(address)) >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(data) = device_at(at(address)); return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(reserve_addresses(current_device(), bytes));
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { free_addresses(at(address), bytes); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long) {
  *handle = create_physical(prop ? prop->location.id : 0, bytes);
  return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { release_physical(handle); return CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  return map(at(address), bytes, handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { unmap(at(address), bytes); return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranule;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  copy(stream_at(nullptr), at(to), from, bytes, CopyKind::kToDevice);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  copy(stream_at(nullptr), to, at(from), bytes, CopyKind::kToHost);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  copy(stream_at(stream), at(to), from, bytes, CopyKind::kToDevice);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  copy(stream_at(stream), to, at(from), bytes, CopyKind::kToHost);
  return CUDA_SUCCESS;
}

// -- streams and events -----------------------------------------------------------------------------------------------

CUresult cuStreamSynchronize(CUstream stream) { finish(stream_at(stream)); return CUDA_SUCCESS; }
CUresult cuStreamQuery(CUstream stream) { return is_done(stream_at(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned) { wait_for(stream_at(s), event_at(e)); return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent* event, unsigned) { *event = reinterpret_cast<CUevent>(create_event()); return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) { record(event_at(event), stream_at(stream)); return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent event) { return is_done(event_at(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
CUresult cuEventSynchronize(CUevent event) { finish(event_at(event)); return CUDA_SUCCESS; }
CUresult cuEventDestroy_v2(CUevent event) { destroy_event(event_at(event)); return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = is_capturing(stream_at(stream)) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// -- modules and kernels ----------------------------------------------------------------------------------------------

CUresult cuModuleLoad(CUmodule* module, const char*) { *module = reinterpret_cast<CUmodule>(0x40); return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return cuModuleLoad(module, nullptr); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return cuModuleLoad(module, nullptr); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) { *function = named(name); return CUDA_SUCCESS; }
CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(0x50);
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* found, CUlibrary, const char* name) { *found = reinterpret_cast<CUkernel>(named(name)); return CUDA_SUCCESS; }
CUresult cuKernelGetFunction(CUfunction* found, CUkernel kernel) { *found = reinterpret_cast<CUfunction>(kernel); return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = card().binary; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void**, void**) {
  kernel(stream_at(stream), reinterpret_cast<const char*>(function));
  return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream stream, void**) {
  kernel(stream_at(stream), reinterpret_cast<const char*>(function));
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  kernel(stream_at(config->hStream), reinterpret_cast<const char*>(function));
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  *blocks = std::max(1, std::min(card().max_blocks, card().max_threads / std::max(threads, 1)));
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = card().num_processors / 2;
  return CUDA_SUCCESS;
}

// -- itself -----------------------------------------------------------------------------------------------------------

CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  if (!strcmp(name, "cuGetProcAddress")) *function = reinterpret_cast<void*>(cuGetProcAddress_v2);
  for (const char* suffix : {"_v4", "_v3", "_v2", ""})
    if (!*function) *function = dlsym(self, (std::string(name) + suffix).c_str());
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
