// Compiled once per instruction set (SACCADE_ISA): the table of its kernels for diagonal states.
#include "diagonal_conv.hpp"
#include "diagonal_gated.hpp"
#include "diagonal_scan.hpp"

namespace saccade {
namespace SACCADE_ISA {

#define SACCADE_JOIN_(a, b) a##b
#define SACCADE_JOIN(a, b) SACCADE_JOIN_(a, b)

bool is_f64(const Scan& c) { return c.u.dtype == DType::f64; }
bool is_f64(const GatedUnit& c) { return c.x.dtype == DType::f64; }
bool is_f64(const Convolution& c) { return c.x.dtype == DType::f64; }

// tasks of a struct template of the compute type
#define SACCADE_BOTH(Call, Kernel, count, bytes, body)                                           \
  {[](const Call& c) { return is_f64(c) ? Kernel<double>::count(c) : Kernel<float>::count(c); }, \
   [](const Call& c) { return is_f64(c) ? Kernel<double>::bytes(c) : Kernel<float>::bytes(c); }, \
   [](const Call& c, int64_t task, char* scratch) {                                              \
     is_f64(c) ? Kernel<double>::body(c, task, scratch) : Kernel<float>::body(c, task, scratch); \
   }}

constexpr DiagonalKernels table = {
    SACCADE_BOTH(Scan, SelectiveScan, tasks, scratch_bytes, task),
    SACCADE_BOTH(Scan, ScanBackward, tasks, scratch_bytes, task),
    [](const Scan& c) { return is_f64(c) ? SelectiveScan<double>::blocks(c) : SelectiveScan<float>::blocks(c); },
    [](const Scan& c, int64_t token) {
      is_f64(c) ? ScanBackward<double>::fold(c, token) : ScanBackward<float>::fold(c, token);
    },
    SACCADE_BOTH(GatedUnit, RgLru, tasks, no_scratch, task),
    SACCADE_BOTH(GatedUnit, RgLru, tasks, scratch_bytes, backward),
    SACCADE_BOTH(Convolution, CausalConv, tasks, scratch_bytes, task),
    SACCADE_BOTH(Convolution, CausalConv, final_tasks, scratch_bytes, final_state),
    SACCADE_BOTH(Convolution, CausalConv, tasks, scratch_bytes, backward),
};

}  // namespace SACCADE_ISA

const DiagonalKernels* SACCADE_JOIN(diagonal_, SACCADE_ISA)() { return &SACCADE_ISA::table; }

}  // namespace saccade
