// libcudart.so: streams, events, and graphs (of which there are handles only).
#include "cudart.h"

using namespace phantom;
using namespace phantom::runtime;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(create_stream(current_device(), priority));
  count("runtime", "cudaStreamCreate");
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { destroy_stream(stream_at(stream)); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) { *priority = priority_of(stream_at(s)); return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return is_done(stream_at(s)) ? cudaSuccess : fail(cudaErrorNotReady); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { finish(stream_at(stream)); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { wait_for(stream_at(s), event_at(e)); return cudaSuccess; }

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  struct Call { cudaStreamCallback_t function; cudaStream_t stream; void* data; };
  call(stream_at(stream), [](void* found) {
    auto* each = static_cast<Call*>(found);
    each->function(each->stream, cudaSuccess, each->data);
    delete each;
  }, new Call{function, stream, data});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) { call(stream_at(s), function, data); return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(create_event());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { destroy_event(event_at(event)); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { record(event_at(e), stream_at(s)); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return is_done(event_at(event)) ? cudaSuccess : fail(cudaErrorNotReady); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { finish(event_at(event)); return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!milliseconds_between(event_at(begin), event_at(end), ms)) return fail(cudaErrorInvalidResourceHandle);
  return is_done(event_at(begin)) && is_done(event_at(end)) ? cudaSuccess : fail(cudaErrorNotReady);
}

// -- graphs: handles only ---------------------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_capturing(stream_at(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  if (id) *id = capture_id(stream_at(stream));
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(0x10);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) { begin_capture(stream_at(stream)); return cudaSuccess; }
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) {
  begin_capture(stream_at(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  end_capture(stream_at(stream));
  *graph = reinterpret_cast<cudaGraph_t>(0x10);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(0x20);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiateWithFlags(made, g, f); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { kernel(stream_at(stream), "graph"); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) { *count = 0; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

}  // extern "C"
