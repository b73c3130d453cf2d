// libcudnn.so.9: recurrent layers, whose kernels do nothing. Weights and biases lie as cuDNN's reference says: all
// matrices of a layer and direction, one after the other, and behind those of all layers the biases. What training
// reserves and what a call works in is documented nowhere; both are assumed here, and no measurement of a card.
#include <cudnn.h>

#include "cudnn_handle.h"

using namespace phantom;

namespace {

size_t bytes_of(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE: case CUDNN_DATA_INT64: return 8;
    case CUDNN_DATA_HALF: case CUDNN_DATA_BFLOAT16: return 2;
    default: return 4;
  }
}

struct Layers {
  cudnnRNNMode_t cell;
  cudnnRNNBiasMode_t bias;
  cudnnDirectionMode_t direction;
  cudnnDataType_t type;
  size_t input, hidden, projected, num_layers;

  size_t num_gates() const { return cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1; }
  size_t num_directions() const { return direction == CUDNN_BIDIRECTIONAL ? 2 : 1; }
  size_t num_pseudo_layers() const { return num_layers * num_directions(); }
  size_t num_biases() const {
    return bias == CUDNN_RNN_NO_BIAS ? 0 : bias == CUDNN_RNN_DOUBLE_BIAS ? 2 * num_gates() : num_gates();
  }
  bool is_projected() const { return projected != hidden; }
  size_t input_of(size_t pseudo_layer) const {
    return pseudo_layer < num_directions() ? input : num_directions() * projected;
  }
  size_t weights_of(size_t pseudo_layer) const {
    return num_gates() * hidden * (input_of(pseudo_layer) + projected) + (is_projected() ? projected * hidden : 0);
  }
  size_t weights_before(size_t pseudo_layer) const {
    size_t found = 0;
    for (size_t each = 0; each < pseudo_layer; ++each) found += weights_of(each);
    return found;
  }
  size_t all_bytes() const {
    return (weights_before(num_pseudo_layers()) + num_pseudo_layers() * num_biases() * hidden) * bytes_of(type);
  }
};

struct Sequences { cudnnDataType_t type; size_t length, batch, width; };

const Layers& layers(const cudnnRNNDescriptor_t each) { return *reinterpret_cast<const Layers*>(each); }

void put(cudnnTensorDescriptor_t descriptor, cudnnDataType_t type, size_t rows, size_t columns) {
  auto* made = reinterpret_cast<Descriptor*>(descriptor);
  *made = {};
  made->dims = 3;
  made->type = type;
  made->sizes[0] = 1;
  made->sizes[1] = static_cast<int>(rows);
  made->sizes[2] = static_cast<int>(columns);
  made->strides[0] = static_cast<int>(rows * columns);
  made->strides[1] = static_cast<int>(columns);
  made->strides[2] = 1;
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* made) {
  *made = reinterpret_cast<cudnnRNNDescriptor_t>(new Layers{});
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t made) {
  delete reinterpret_cast<Layers*>(made);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* made) {
  *made = reinterpret_cast<cudnnRNNDataDescriptor_t>(new Sequences{});
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t made) {
  delete reinterpret_cast<Sequences*>(made);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t made, cudnnRNNAlgo_t, cudnnRNNMode_t cell,
                                       cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction, cudnnRNNInputMode_t,
                                       cudnnDataType_t type, cudnnDataType_t, cudnnMathType_t, int32_t input,
                                       int32_t hidden, int32_t projected, int32_t num_layers, cudnnDropoutDescriptor_t,
                                       uint32_t) {
  *reinterpret_cast<Layers*>(made) = {cell, bias, direction, type, size_t(input), size_t(hidden), size_t(projected), size_t(num_layers)};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t made, cudnnDataType_t type, cudnnRNNDataLayout_t,
                                        int length, int batch, int width, const int[], void*) {
  *reinterpret_cast<Sequences*>(made) = {type, size_t(length), size_t(batch), size_t(width)};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t made, size_t* bytes) {
  *bytes = layers(made).all_bytes();
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t made, int32_t pseudo_layer, size_t,
                                      const void* space, int32_t index, cudnnTensorDescriptor_t matrix,
                                      void** matrix_at, cudnnTensorDescriptor_t bias, void** bias_at) {
  const Layers& of = layers(made);
  const size_t at = size_t(index), gates = of.num_gates(), element = bytes_of(of.type);
  const bool is_projection = at == 2 * gates;
  const size_t rows = is_projection ? of.projected : of.hidden;
  const size_t columns = is_projection ? of.hidden : at < gates ? of.input_of(pseudo_layer) : of.projected;
  size_t before = of.weights_before(pseudo_layer) + std::min(at, gates) * of.hidden * of.input_of(pseudo_layer);
  if (at > gates) before += (at - gates) * of.hidden * of.projected;
  char* begin = static_cast<char*>(const_cast<void*>(space));
  if (matrix) put(matrix, of.type, rows, columns);
  if (matrix_at) *matrix_at = begin + before * element;
  const bool has_bias = at < of.num_biases();
  const size_t biases = of.weights_before(of.num_pseudo_layers()) + (pseudo_layer * of.num_biases() + at) * of.hidden;
  if (bias && has_bias) put(bias, of.type, of.hidden, 1);
  if (bias_at) *bias_at = has_bias ? begin + biases * element : nullptr;
  return CUDNN_STATUS_SUCCESS;
}

// Assumed: forward works in the gates of one layer. Training reserves the gates of all, for an LSTM the cells' states
// and for a GRU the candidate's recurrent term, and each layer's output; inference reserves nothing.
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t made, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t data, size_t* work, size_t* reserve) {
  const Layers& of = layers(made);
  const auto* sequences = reinterpret_cast<const Sequences*>(data);
  const size_t positions = sequences->length * sequences->batch * bytes_of(of.type);
  const size_t states = of.num_gates() + (of.num_gates() > 1 ? 1 : 0);
  if (work) *work = positions * of.num_directions() * of.num_gates() * of.hidden;
  if (reserve)
    *reserve = mode == CUDNN_FWD_MODE_TRAINING ? positions * of.num_pseudo_layers() * (states * of.hidden + of.projected) : 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnRNNForward(cudnnHandle_t handle, cudnnRNNDescriptor_t, cudnnForwardMode_t, const int32_t[],
                              cudnnRNNDataDescriptor_t, const void*, cudnnRNNDataDescriptor_t, void*,
                              cudnnTensorDescriptor_t, const void*, void*, cudnnTensorDescriptor_t, const void*, void*,
                              size_t, const void*, size_t, void*, size_t, void*) {
  return run(handle, "cudnnRNNForward");
}
cudnnStatus_t cudnnRNNBackwardData_v8(cudnnHandle_t handle, cudnnRNNDescriptor_t, const int32_t[],
                                      cudnnRNNDataDescriptor_t, const void*, const void*, cudnnRNNDataDescriptor_t,
                                      void*, cudnnTensorDescriptor_t, const void*, const void*, void*,
                                      cudnnTensorDescriptor_t, const void*, const void*, void*, size_t, const void*,
                                      size_t, void*, size_t, void*) {
  return run(handle, "cudnnRNNBackwardData_v8");
}
cudnnStatus_t cudnnRNNBackwardWeights_v8(cudnnHandle_t handle, cudnnRNNDescriptor_t, cudnnWgradMode_t, const int32_t[],
                                         cudnnRNNDataDescriptor_t, const void*, cudnnTensorDescriptor_t, const void*,
                                         cudnnRNNDataDescriptor_t, const void*, size_t, void*, size_t, void*, size_t,
                                         void*) {
  return run(handle, "cudnnRNNBackwardWeights_v8");
}

cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t made, int most, cudnnDataType_t* type, int* dims,
                                         int sizes[], int strides[]) {
  const auto* found = reinterpret_cast<const Descriptor*>(made);
  if (type) *type = static_cast<cudnnDataType_t>(found->type);
  if (dims) *dims = found->dims;
  for (int each = 0; each < std::min(most, found->dims); ++each) {
    if (sizes) sizes[each] = found->sizes[each];
    if (strides) strides[each] = found->strides[each];
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
