// Modules, kernels and host functions.
//
// A module is PTX text, read only for its version, its target and its entries; the kernel of that
// name is the C++ one of host/kernels.cpp. A name missing in the PTX is therefore not found here
// either, and PTX for a newer device is refused.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "region.h"

// The kernels as C++ (host/kernels.cpp). Each takes one struct.
struct HostKernel;
extern "C" const HostKernel* kvp_host_find(const char* name);
extern "C" unsigned kvp_host_parameter_bytes(const HostKernel* kernel);
extern "C" void kvp_host_cta(const HostKernel* kernel, unsigned grid, unsigned block, unsigned cta, void** args, unsigned order);

namespace mock {
struct Function {
  struct Module* module = nullptr;
  const HostKernel* kernel = nullptr;
  std::string name;
  unsigned shared_most = 48u << 10;  // dynamic shared memory that a launch may ask for
};

struct Module : Handle {
  Device* device;
  std::string text;
  bool is_code = false;  // machine code, not PTX
  std::map<std::string, Function> functions;
  explicit Module(Device* device) : Handle(MODULE), device(device) {}
};

static std::map<const void*, Function*>& functions() {
  static auto* all = new std::map<const void*, Function*>;
  return *all;
}

// Returns the newest PTX version that a driver of this version accepts: 12.0 accepts ISA 8.0 (table
// PTX Release History).
static int isa_of_driver(int version) {
  static const int OF_12[] = {80, 81, 82, 83, 84, 85, 85, 85, 87, 88};
  int major = version / 1000, minor = version % 1000 / 10;
  if (major < 12) return 70 + (minor > 8 ? 8 : minor);
  return major == 12 ? OF_12[minor > 9 ? 9 : minor] : 90;
}

// CUDA: machine code (an ELF file, with the architecture in its flags) runs on devices of the same major
// version, and of this minor one or a later one; on others there is CUDA_ERROR_NO_BINARY_FOR_GPU.
static int load_code(void** module, const char* image, Call& call) {
  uint32_t flags;
  uint64_t sections_at;
  uint16_t section_bytes, section_count;
  memcpy(&sections_at, image + 40, 8), memcpy(&flags, image + 48, 4), memcpy(&section_bytes, image + 58, 2), memcpy(&section_count, image + 60, 2);
  int major = int(flags & 0xFF) / 10, minor = int(flags & 0xFF) % 10;
  if (major != call.device->major || minor > call.device->minor) return NO_BINARY_FOR_GPU;
  Module* fresh = new Module(call.device);
  fresh->is_code = true;
  // The table of sections is followed by that of segments, which no name is in.
  fresh->text.assign(image, sections_at + uint64_t(section_bytes) * section_count);
  *module = adopt(fresh);
  return OK;
}

static int load(void** module, const void* image, Call& call) {
  const char* text = static_cast<const char*>(image);
  if (!module || !text) return INVALID_VALUE;
  if (!memcmp(text, "\x7f" "ELF", 4)) return load_code(module, text, call);
  const char *version = strstr(text, ".version "), *target = strstr(text, ".target sm_");
  if (!version || !target) return INVALID_IMAGE;
  int major = 0, minor = 0;
  if (sscanf(version, ".version %d.%d", &major, &minor) != 2) return INVALID_PTX;
  if (major * 10 + minor > isa_of_driver(machine().version)) return UNSUPPORTED_PTX_VERSION;
  if (machine().rules.compilation) return machine().rules.compilation;
  if (atoi(target + strlen(".target sm_")) > call.device->major * 10 + call.device->minor) return INVALID_PTX;
  Module* fresh = new Module(call.device);
  fresh->text = text;
  *module = adopt(fresh);
  return OK;
}

// CUDA: parameters are copied from `kernelParams` at the call, with the sizes that the function
// declares; the arrays need not outlive it. CTAs may run in any order: here one CTA per step,
// shuffled.
struct Launch : Op {
  const Function* function = nullptr;
  unsigned grid = 0, block = 0, ran = 0;
  std::shared_ptr<std::vector<std::max_align_t>> params;  // one struct, copied at the call
  std::vector<unsigned> order;

  const char* what() const override { return function->name.c_str(); }

  std::unique_ptr<Op> again() const override {
    auto launch = std::make_unique<Launch>();
    launch->function = function, launch->grid = grid, launch->block = block, launch->params = params;
    return launch;
  }

  struct Cta { Launch* launch; void** args; unsigned cta, threads; };

  bool step(Device&) override {
    if (order.empty())
      for (unsigned i = 0; i < grid; i++) {
        order.push_back(i);
        if (machine().style != Style::Fifo) std::swap(order[i], order[random_below(i + 1)]);
      }
    void* args[] = {params->data()};
    Cta cta{this, args, order[ran], unsigned(random_below(1u << 30))};
    auto body = [](void* data) {
      Cta& cta = *static_cast<Cta*>(data);
      kvp_host_cta(cta.launch->function->kernel, cta.launch->grid, cta.launch->block, cta.cta, cta.args, cta.threads);
    };
    if (int code = guarded(body, &cta)) throw Fault{code};
    return ++ran == grid;
  }
};

// CUDA: the function runs on a thread of the driver when the stream reaches it, and later work of
// the stream waits for its return. It is not called after the context has failed (a callback of
// cuStreamAddCallback is).
struct HostCall : Op {
  void (*function)(void*) = nullptr;
  void* data = nullptr;
  Stream* stream = nullptr;
  bool begun = false;  // once set, the stream's head waits for the return

  const char* what() const override { return "host function"; }
  bool ready() const override { return !begun; }
  bool step(Device&) override {
    begun = true;
    call_back([function = function, data = data, stream = stream, mark = mark] {
      bool alive;
      {
        std::lock_guard<std::mutex> lock(machine().lock);
        alive = !stream->device->failed;
      }
      if (alive) function(data);
      std::lock_guard<std::mutex> lock(machine().lock);
      if (!stream->device->failed && !stream->queue.empty() && stream->queue.front()->mark == mark) finish_head(stream);
    });
    return false;
  }
};

static Function* known(const void* raw, const char* called) {
  auto found = functions().find(raw);
  if (found == functions().end()) die("%s: %p is not a function", called, raw);
  if (!found->second->module->alive) die("%s: the module of %s was unloaded before", called, found->second->name.c_str());
  return found->second;
}
}  // namespace mock

using namespace mock;

API cuModuleLoadData(void** module, const void* image) {
  ENTER(ALIVE | UNSAFE);
  return load(module, image, call);
}

// CUDA options: 5 and 6 are the buffer for messages of errors and its size.
API cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values) {
  ENTER(ALIVE | UNSAFE);
  char* log = nullptr;
  size_t bytes = 0;
  for (unsigned i = 0; i < count; i++) {
    if (options[i] == 5) log = static_cast<char*>(values[i]);
    if (options[i] == 6) bytes = reinterpret_cast<size_t>(values[i]);
  }
  int code = load(module, image, call);
  if (code && log && bytes) snprintf(log, bytes, "ptxas fatal   : the mock refuses this PTX with code %d", code);
  return code;
}

// CUDA: unloads the module with everything in it; a launch in flight must be done before, so the
// call waits for it.
API cuModuleUnload(void* raw) {
  ENTER(CONTEXT | UNSAFE);
  Module* module = use<Module>(raw, MODULE, __func__);
  int result = drive_all(call, module->device);
  destroy(module);
  return result;
}

// CUDA: CUDA_ERROR_NOT_FOUND if the module has no function of that name.
API cuModuleGetFunction(void** function, void* raw, const char* name) {
  ENTER(ALIVE);
  Module* module = use<Module>(raw, MODULE, __func__);
  if (!function || !name) return INVALID_VALUE;
  std::string entry = std::string(".entry ") + name;
  size_t at = module->text.find(module->is_code ? std::string(name) + '\0' : entry + "(");
  if (at == std::string::npos) at = module->text.find(entry + "\n");
  const HostKernel* kernel = kvp_host_find(name);
  if (!kernel || at == std::string::npos) return NOT_FOUND;
  // CUDA: the same function each time, with the attributes set before.
  Function& known = module->functions[name];
  if (!known.kernel) known = {module, kernel, name};
  functions()[&known] = &known;
  *function = &known;
  return OK;
}

API cuFuncGetAttribute(int* value, int attribute, void* raw) {
  ENTER(ALIVE);
  known(raw, __func__);
  switch (attribute) {
    case 0: *value = 1024; return OK;                                     // threads per block
    case 1: case 2: case 3: case 8: *value = 0; return OK;                // shared, constant, local memory: none
    case 4: *value = 32; return OK;                                       // registers
    case 5: *value = 80; return OK;                                       // PTX ISA
    case 6: *value = call.device->major * 10 + call.device->minor; return OK;
    default: return INVALID_VALUE;
  }
}

API cuFuncSetAttribute(void* raw, int attribute, int value) {
  ENTER(ALIVE);
  Function* function = known(raw, __func__);
  // CUDA: attribute 8 is the maximum dynamic shared memory; devices of compute capability 9.0 have
  // 227 KiB per block, of 8.0 163 KiB. More than 48 KiB have to be asked for.
  unsigned most = (call.device->major >= 9 ? 227u : 163u) << 10;
  if (attribute == 8 && value >= 0 && unsigned(value) <= most) return function->shared_most = unsigned(value), OK;
  return attribute > 8 && attribute < 10 && value >= 0 ? OK : INVALID_VALUE;
}

API cuLaunchKernel(void* raw, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* raw_stream,
                   void** params, void** extra) {
  ENTER(ALIVE);
  Function* function = known(raw, __func__);
  Stream* stream = stream_of(raw_stream, call, __func__);
  if (call.code) return call.code;
  // CUDA: no dimension is zero, and a block has at most 1024 threads; dynamic shared memory is at
  // most what the function was allowed. The shim runs one-dimensional
  // grids and blocks.
  if (!gx || !gy || !gz || !bx || !by || !bz || bx > 1024 || gx > 0x7fffffffu || shared > function->shared_most) return INVALID_VALUE;
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || extra || !params) return NOT_SUPPORTED;
  // CUDA: CUDA_ERROR_INVALID_HANDLE if function and stream are of different contexts.
  if (function->module->device != stream->device) return INVALID_HANDLE;
  auto launch = std::make_unique<Launch>();
  launch->function = function, launch->grid = gx, launch->block = bx;
  size_t bytes = kvp_host_parameter_bytes(function->kernel);
  launch->params = std::make_shared<std::vector<std::max_align_t>>(bytes / sizeof(std::max_align_t) + 1);
  memcpy(launch->params->data(), params[0], bytes);
  machine().launches.insert({function->name, gx, bx, shared, stream->id});
  return enqueue(stream, std::move(launch));
}

API cuLaunchHostFunc(void* raw, void (*function)(void*), void* data) {
  ENTER(ALIVE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (!function) return INVALID_VALUE;
  auto op = std::make_unique<HostCall>();
  op->function = function, op->data = data, op->stream = stream;
  return enqueue(stream, std::move(op));
}
