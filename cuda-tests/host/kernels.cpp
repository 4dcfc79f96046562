// The kernels compiled for the host, by name, and the functions that the mock driver and the tests
// call.
#define KVP_HOST 1
#include "../../kernels/kvpool.cu"
#include "../../kernels/probes.cu"

#include <cstdlib>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "cta.h"

namespace {

using shim::Dim;
using shim::Kernel;

template <auto F, class = decltype(F)>
struct Entry;
template <auto F, class Params>
struct Entry<F, void (*)(Params)> {
  static constexpr unsigned BYTES = sizeof(Params);
  // Copies the parameters, as a launch does: the caller's bytes may be unaligned.
  static void call(void** arguments) {
    alignas(Params) unsigned char copy[sizeof(Params)];
    memcpy(copy, arguments[0], sizeof(Params));
    F(*std::launder(reinterpret_cast<Params*>(copy)));
  }
};

bool is_alone(void**) { return false; }

// Only dynamic scales need the largest value of a head.
bool finds_scales(void** arguments) {
  QuantParams params;
  memcpy(&params, arguments[0], sizeof(params));
  return params.mode == SCALES_PER_TOKEN_HEAD;
}

#define KVP_ENTRY(name, is_cooperative) {#name, Entry<&name>::call, Entry<&name>::BYTES, is_cooperative}

const Kernel KERNELS[] = {
    KVP_ENTRY(kvp_copy, is_alone),
    KVP_ENTRY(kvp_copy_bulk, is_alone),
    KVP_ENTRY(kvp_zero, is_alone),
    KVP_ENTRY(kvp_pack, is_alone),
    KVP_ENTRY(kvp_rows, is_alone),
    KVP_ENTRY(kvp_quantise, finds_scales),
    KVP_ENTRY(kvp_dequantise, is_alone),
    KVP_ENTRY(kvp_patch, is_alone),
    KVP_ENTRY(kvp_probe_read, is_alone),
    KVP_ENTRY(kvp_probe_copy, is_alone),
    KVP_ENTRY(kvp_probe_burn, is_alone),
    KVP_ENTRY(kvp_probe_compare, is_alone),
    KVP_ENTRY(kvp_probe_gather, is_alone),
    KVP_ENTRY(kvp_probe_quantise, finds_scales),
    KVP_ENTRY(kvp_probe_quantise_row_first, finds_scales),
    KVP_ENTRY(kvp_probe_dequantise, is_alone),
};

}  // namespace

// Returns the kernel of that name, or null.
extern "C" const Kernel* kvp_host_find(const char* name) {
  for (const Kernel& kernel : KERNELS)
    if (strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

// Returns the size in bytes of the kernel's parameter struct.
extern "C" unsigned kvp_host_parameter_bytes(const Kernel* kernel) { return kernel->parameter_bytes; }

// Runs one CTA of `gx`, with `bx` threads. Bit 0 of `order`: descending order of threads.
extern "C" void kvp_host_cta(const Kernel* kernel, unsigned gx, unsigned bx, unsigned index, void** arguments,
                             unsigned order) {
  shim::run_cta(*kernel, {gx, 1, 1}, {bx, 1, 1}, {index, 0, 0}, arguments, order & 1);
}

// Runs all CTAs, in the order that shim.h defines. Returns 0, or 500 (CUDA_ERROR_NOT_FOUND) for an
// unknown name.
extern "C" int kvp_host_launch(const char* name, unsigned gx, unsigned bx, void** arguments, unsigned order) {
  const Kernel* kernel = kvp_host_find(name);
  if (!kernel) return 500;
  std::vector<unsigned> ctas(gx);
  for (unsigned i = 0; i < gx; i++) ctas[i] = order & 2 ? gx - 1 - i : i;
  if (order >> 2) {
    std::minstd_rand random(order >> 2);
    for (unsigned i = gx; i > 1; i--) std::swap(ctas[i - 1], ctas[random() % i]);
  }
  for (unsigned index : ctas) kvp_host_cta(kernel, gx, bx, index, arguments, order);
  return 0;
}

// The converters of codes.h and floats.h alone, applied element by element.
extern "C" void kvp_host_encode(unsigned code, const float* values, u8* codes, size_t n) {
  for (size_t i = 0; i < n; i++)
    codes[i] = u8(code == CODES_E4M3   ? E4m3::encode(values[i])
                  : code == CODES_E5M2 ? E5m2::encode(values[i])
                                       : Int8::encode(values[i]));
}
extern "C" void kvp_host_decode(unsigned code, const u8* codes, float* values, size_t n) {
  for (size_t i = 0; i < n; i++)
    values[i] = code == CODES_E4M3   ? E4m3::decode(codes[i])
                : code == CODES_E5M2 ? E5m2::decode(codes[i])
                                     : Int8::decode(codes[i]);
}
extern "C" void kvp_host_widen(unsigned row, const u16* bits, float* values, size_t n) {
  for (size_t i = 0; i < n; i++) values[i] = row == ROWS_F16 ? f16_widen(bits[i]) : bf16_widen(bits[i]);
}
extern "C" void kvp_host_narrow(unsigned row, const float* values, u16* bits, size_t n) {
  for (size_t i = 0; i < n; i++) bits[i] = u16(row == ROWS_F16 ? f16_narrow(values[i]) : bf16_narrow(values[i]));
}
