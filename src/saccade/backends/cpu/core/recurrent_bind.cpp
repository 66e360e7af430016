// The Python interface of the recurrences. The caller has checked all shapes and dtypes.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bind.hpp"
#include "recurrent.hpp"

namespace saccade {

namespace {

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Maybe = std::optional<In>;

void inputs(Recurrence& c, const In& q, const In& k, const In& v, const Maybe& g, const Maybe& beta,
            const std::optional<Longs>& borders, const Maybe& initial) {
  c.q = view(q), c.k = view(k), c.v = view(v);
  if (g) c.g = view(*g);
  if (beta) c.beta = view(*beta);
  if (borders) c.borders = borders->data();
  if (initial) c.initial = initial->data();
}

void forward(Recurrence c, int threads, const In& q, const In& k, const In& v, const Maybe& g, const Maybe& beta,
             const std::optional<Longs>& borders, const Maybe& initial, const Any& o, const Any& final_state) {
  inputs(c, q, k, v, g, beta, borders, initial);
  c.o = view(o), c.final_state = final_state.data();
  const Unlocked unlocked;
  run_recurrent_forward(c, threads);
}

void backward(Recurrence c, int threads, const In& q, const In& k, const In& v, const Maybe& g, const Maybe& beta,
              const std::optional<Longs>& borders, const Maybe& initial, const In& dout, const Maybe& dfinal,
              const Any& dq, const Any& dk, const Any& dv, const std::optional<Any>& dg,
              const std::optional<Any>& dbeta, const Any& dinitial) {
  inputs(c, q, k, v, g, beta, borders, initial);
  c.dout = view(dout), c.dq = view(dq), c.dk = view(dk), c.dv = view(dv), c.dinitial = dinitial.data();
  if (dfinal) c.dfinal = dfinal->data();
  if (dg) c.dg = view(*dg);
  if (dbeta) c.dbeta = view(*dbeta);
  const Unlocked unlocked;
  run_recurrent_backward(c, threads);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  nb::class_<Recurrence>(m, "Recurrence")
      .def("__init__", [](Recurrence* self, int64_t B, int64_t T, int64_t N, int64_t H, int64_t Hk, int64_t K,
                          int64_t F, int64_t V, double scale, int64_t chunk, int feature, int decay, bool delta,
                          bool normalize, bool causal, int64_t block) {
        new (self)
            Recurrence{B,     T,         N,      H,     Hk, K,  F,  V,  scale, chunk, Feature(feature), Decay(decay),
                       delta, normalize, causal, block, {}, {}, {}, {}, {},    {}};
      });
  m.def("recurrent_forward", &forward, nb::arg("call"), nb::arg("threads"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("g").none(), nb::arg("beta").none(), nb::arg("borders").none(), nb::arg("initial").none(), nb::arg("o"),
        nb::arg("final_state"));
  m.def("recurrent_backward", &backward, nb::arg("call"), nb::arg("threads"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("g").none(), nb::arg("beta").none(), nb::arg("borders").none(), nb::arg("initial").none(),
        nb::arg("do"), nb::arg("dfinal").none(), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"), nb::arg("dg").none(),
        nb::arg("dbeta").none(), nb::arg("dinitial"));
}

}  // namespace saccade
