// The Python interface of the recurrences with diagonal states: arrays by name. The caller has checked them.
#include <deque>
#include <string_view>
#include <utility>

#include "bind.hpp"
#include "diagonal_types.hpp"

namespace saccade {

namespace {

// the arguments of a call, kept alive until it ends; a name that is missing or None gives no data
class Given {
 public:
  explicit Given(nb::dict arrays) : arrays_(arrays) {}
  Array operator()(const char* name) {
    const In* a = find(name);
    return a ? view(*a) : Array{};
  }
  void* data(const char* name) {
    const In* a = find(name);
    return a ? const_cast<void*>(a->data()) : nullptr;
  }
  size_t rank(const char* name) {
    const In* a = find(name);
    return a ? a->ndim() : 0;
  }
  int64_t size(const char* name, size_t axis) { return static_cast<int64_t>(find(name)->shape(axis)); }

 private:
  // the conversion of an array takes a microsecond, so each is done once
  const In* find(std::string_view name) {
    for (const auto& [known, array] : kept_)
      if (known == name) return &array;
    const nb::object array = arrays_.get(name.data(), nb::none());
    return array.is_none() ? nullptr : &kept_.emplace_back(name, nb::cast<In>(array)).second;
  }
  nb::dict arrays_;
  std::deque<std::pair<std::string_view, In>> kept_;
};

// the sequences of an array [B, T, ..], with the borders where they are packed into one row
Tokens tokens(Given& a, const char* name) {
  Tokens t;
  t.starts = static_cast<const int64_t*>(a.data("cu_seqlens"));
  t.count = t.starts ? a.size("cu_seqlens", 0) - 1 : a.size(name, 0);
  t.length = a.size(name, 1);
  return t;
}

void scan(nb::dict arrays, int64_t chunk, bool softplus, bool backward, int threads) {
  Given a(arrays);
  Scan c;
  c.tokens = tokens(a, "u");
  c.chunk = chunk, c.softplus = softplus;
  c.u = a("u"), c.delta = a("delta"), c.z = a("z"), c.A = a("A"), c.skip = a("D"), c.bias = a("delta_bias");
  c.B = a("B"), c.C = a("C"), c.fixed_B = a.rank("B") == 2, c.fixed_C = a.rank("C") == 2;
  c.D = a.size("A", 0), c.N = a.size("A", 1);
  c.G = !c.fixed_B ? a.size("B", 2) : !c.fixed_C ? a.size("C", 2) : 1;
  c.initial = a.data("initial_state");
  c.y = a("y"), c.final = a.data("final_state");
  if (backward) {
    c.dy = a("dy"), c.dfinal = a.data("dfinal_state");
    c.du = a("du"), c.ddelta = a("ddelta"), c.dz = a("dz"), c.dB = a("dB"), c.dC = a("dC");
    c.fixed_dB = c.fixed_B ? a.data("dB") : nullptr, c.fixed_dC = c.fixed_C ? a.data("dC") : nullptr;
    c.dA = a.data("dA"), c.dskip = a.data("dD"), c.dbias = a.data("ddelta_bias"), c.dinitial = a.data("dinitial_state");
  }
  const Unlocked unlocked;
  backward ? run_scan_backward(c, threads) : run_scan(c, threads);
}

void gated(nb::dict arrays, int64_t chunk, bool backward, int threads) {
  Given a(arrays);
  GatedUnit c;
  c.tokens = tokens(a, "x");
  c.W = a.size("x", 2), c.chunk = chunk;
  c.x = a("x"), c.r = a("r"), c.i = a("i"), c.a_param = a("a_param"), c.initial = a.data("initial_state");
  c.y = a("y"), c.final = a.data("final_state");
  if (backward) {
    c.dy = a("dy"), c.dfinal = a.data("dfinal_state");
    c.dx = a("dx"), c.dr = a("dr"), c.di = a("di");
    c.da_param = a.data("da_param"), c.dinitial = a.data("dinitial_state");
  }
  const Unlocked unlocked;
  backward ? run_gated_backward(c, threads) : run_gated(c, threads);
}

void convolution(nb::dict arrays, int64_t piece, bool silu, bool backward, int threads) {
  Given a(arrays);
  Convolution c;
  c.tokens = tokens(a, "x");
  c.D = a.size("weight", 0), c.K = a.size("weight", 1), c.piece = piece, c.silu = silu;
  c.x = a("x"), c.weight = a("weight"), c.bias = a("bias"), c.initial = a.data("initial_state");
  c.y = a("y"), c.final = a.data("final_state");
  if (backward) {
    c.dy = a("dy"), c.dfinal = a.data("dfinal_state");
    c.dx = a("dx"), c.dinitial = a.data("dinitial_state");
    c.dweight = a.data("dweight"), c.dbias = a.data("dbias");
  }
  const Unlocked unlocked;
  backward ? run_conv_backward(c, threads) : run_conv(c, threads);
}

}  // namespace

void bind_diagonal(nb::module_& m) {
  m.def("selective_scan", &scan);
  m.def("rg_lru", &gated);
  m.def("causal_conv1d", &convolution);
}

}  // namespace saccade
