// The Python interface of the core. The caller has checked all shapes and dtypes.
#include "bind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "dispatch.hpp"
#include "exchange.hpp"
#include "pool.hpp"
#include "sets.hpp"
#include "system.hpp"

namespace nb = nanobind;
using namespace saccade;

namespace {

unsigned long main_thread = 0;

void ask_signals() {
  nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

saccade::Unlocked::Unlocked() : interruptible_(PyThread_get_thread_ident() == main_thread ? &ask_signals : nullptr) {}

namespace {

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;

// a part of a plan, with references that keep the arrays behind its pointers alive
struct PlanPart {
  Part part{};
  std::vector<Mask> masks;
  std::vector<nb::object> owned;

  const int32_t* ints(nb::handle h) {
    owned.push_back(nb::borrow(h));
    return nb::cast<Ints>(h).data();
  }
};

int64_t batch_stride(const Ints& a) { return a.shape(0) > 1 ? a.stride(0) : 0; }

Mask read_mask(PlanPart& p, nb::handle lowered) {
  Mask m{};
  const Ints bands = nb::cast<Ints>(lowered.attr("bands"));
  m.bands = p.ints(lowered.attr("bands"));
  m.n_bands = static_cast<int>(bands.shape(1));
  m.batch_stride = batch_stride(bands);
  m.uses = p.ints(lowered.attr("uses"));
  for (nb::handle h : lowered.attr("rows")) {
    if (m.n_rows == 8) throw std::invalid_argument("a lowered mask holds at most 8 row intervals");
    Rows& r = m.rows[m.n_rows++];
    r.batch_stride = batch_stride(nb::cast<Ints>(h.attr("lo")));
    r.lo = p.ints(h.attr("lo"));
    r.hi = p.ints(h.attr("hi"));
    r.on_keys = nb::cast<std::string>(h.attr("axis")) == "k";
  }
  for (nb::handle h : lowered.attr("grids")) {
    if (m.n_grids == 4) throw std::invalid_argument("a lowered mask holds at most 4 tile grids");
    Grid& g = m.grids[m.n_grids++];
    const Bytes bits = nb::cast<Bytes>(h.attr("bits"));
    p.owned.push_back(nb::borrow(h.attr("bits")));
    g.bits = bits.data();
    g.batch_stride = bits.shape(0) > 1 ? bits.stride(0) : 0;
    g.row_stride = bits.stride(1);
    g.block_q = nb::cast<int>(h.attr("block_q"));
    g.block_k = nb::cast<int>(h.attr("block_k"));
  }
  const int32_t* use = m.uses;
  m.one_band = m.n_bands == 1 && !(use[ROWS_IN] | use[ROWS_OUT] | use[GRIDS_IN] | use[GRIDS_OUT]);
  for (size_t b = 0; b < bands.shape(0) && m.one_band; ++b)
    m.one_band = m.bands[static_cast<int64_t>(b) * m.batch_stride + STRIDE] == 1;
  return m;
}

PlanPart* read_part(nb::handle source) {
  auto p = std::make_unique<PlanPart>();
  Part& part = p->part;
  part.step = nb::cast<int>(source.attr("step"));
  part.classes = static_cast<int>(nb::cast<Ints>(source.attr("q_start")).shape(0));
  part.n_tiles = nb::cast<int>(source.attr("n_tiles"));
  part.mask_batches = nb::cast<int>(source.attr("Bm"));
  part.q_start = p->ints(source.attr("q_start"));
  part.k_start = p->ints(source.attr("k_start"));
  part.nq = p->ints(source.attr("nq"));
  part.nk = p->ints(source.attr("nk"));
  if (!source.attr("entry").is_none()) part.entry = p->ints(source.attr("entry"));
  part.head = p->ints(source.attr("head"));
  part.ptr = p->ints(source.attr("ranges").attr("ptr"));
  part.seg = p->ints(source.attr("ranges").attr("seg"));
  if (!source.attr("stages").is_none()) {
    part.n_stages = static_cast<int>(nb::cast<Ints>(source.attr("stages")).shape(0));
    part.stages = p->ints(source.attr("stages"));
  }
  for (nb::handle lowered : source.attr("masks")) p->masks.push_back(read_mask(*p, lowered));
  part.n_masks = static_cast<int>(p->masks.size());
  part.masks = p->masks.data();
  part.one_bands = std::all_of(p->masks.begin(), p->masks.end(), [](const Mask& mask) { return mask.one_band; });
  return p.release();
}

template <class A>
Array broadcast(const A& a) {
  Array x = view(a);
  for (size_t i = 0; i < 4; ++i)
    if (a.shape(i) == 1) x.stride[i] = 0;
  return x;
}

// the scalar options of a call
struct Options {
  int64_t B, Tq, Tk, Hq, Hk, D, Dv;
  double scale, softcap, dropout;
  int64_t range;
};

struct Extra {
  std::optional<In> bias;
  std::optional<Doubles> slopes;
  std::optional<Ints> offset;
  std::optional<Doubles> sinks;
  std::optional<Ints> block_table;
  int64_t page_size;
  uint64_t seed;
  std::optional<In> k_scale, v_scale;
  Code code;
  int64_t group;
  std::optional<In> distances, gates;
  std::optional<Ints> selected;
  int64_t block, rows;
};

// [1 | B, Hq, n] contiguous: one number per distance of a row's position from a key; the last is that of Tk - 1
template <class A>
Array by_distance(const A& a, const Options& o) {
  Array x = view(a);
  x.data += x.unit() * (static_cast<int64_t>(a.shape(2)) - o.Tk);
  x.stride[0] = a.shape(0) > 1 ? x.stride[0] : 0;
  x.stride[2] = 1, x.stride[3] = -1;
  return x;
}

Call make_call(const Options& o, const Extra& e) {
  Call c;
  c.B = o.B, c.Tq = o.Tq, c.Tk = o.Tk, c.Hq = o.Hq, c.Hk = o.Hk, c.G = o.Hq / o.Hk, c.D = o.D, c.Dv = o.Dv;
  c.scale = o.scale, c.softcap = o.softcap, c.range = o.range;
  c.drop_below = static_cast<uint32_t>(o.dropout * 4294967296.0);
  c.keep_scale = 1.0 / (1.0 - o.dropout);
  c.seed[0] = static_cast<uint32_t>(e.seed), c.seed[1] = static_cast<uint32_t>(e.seed >> 32);
  if (e.bias) c.bias = broadcast(*e.bias);
  if (e.distances) c.distances = by_distance(*e.distances, o);
  if (e.slopes) c.slopes = e.slopes->data(), c.slopes_stride = e.slopes->shape(0) > 1 ? e.slopes->stride(0) : 0;
  if (e.offset) c.offset = e.offset->data(), c.offset_stride = e.offset->shape(0) > 1 ? 1 : 0;
  if (e.gates) c.gates = broadcast(*e.gates);
  if (e.sinks) c.sinks = e.sinks->data();
  if (e.selected) {
    const Ints& s = *e.selected;
    const int64_t groups = static_cast<int64_t>(s.shape(2)), n = static_cast<int64_t>(s.shape(3));
    c.selection = {s.data(), s.shape(0) > 1 ? o.Hk * groups * n : 0, groups, n, e.block, e.rows};
  }
  if (e.block_table) {
    c.block_table = e.block_table->data();
    c.table_stride = e.block_table->stride(0);
    c.page_size = e.page_size;
  }
  return c;
}

template <class A>
void coded(Array& x, const A& scale, Code code, int64_t group) {
  const Array s = view(scale);
  x.code = code, x.group = group;
  x.scale = reinterpret_cast<const uint16_t*>(s.data);
  for (int i = 0; i < 3; ++i) x.scale_stride[i] = s.stride[i];
}

std::vector<const Part*> pointers(const std::vector<PlanPart*>& parts) {
  std::vector<const Part*> p;
  for (const PlanPart* x : parts) p.push_back(&x->part);
  return p;
}

void forward(const std::vector<PlanPart*>& parts, const Options& o, int threads, int64_t split_keys, const In& q,
             const In& k, const In& v, const Any& out, const Any& lse, std::optional<Any> max,
             std::optional<Any> entropy, const Extra& e) {
  Call c = make_call(o, e);
  const bool codes = e.code != Code::none;
  c.q = view(q), c.k = view(k, codes), c.v = view(v, codes), c.o = view(out), c.lse = lse.data();
  if (max) c.max = max->data();
  if (entropy) c.entropy = entropy->data();
  if (codes) coded(c.k, *e.k_scale, e.code, e.group), coded(c.v, *e.v_scale, e.code, e.group);
  c.split_keys = split_keys;
  const auto p = pointers(parts);
  const Unlocked unlocked;
  if (split_keys > 0)
    run_decode(c, *p[0], threads);
  else
    run_forward(c, p, threads);
}

// a planned call for tensors of one framework, with no arrays except q, k and v
class Direct {
 public:
  Direct(nb::handle capsule, nb::list parts, const Options& o, int64_t split_keys)
      : api_(Exchange::of(capsule)), kept_(parts), call_(make_call(o, Extra{})) {
    call_.split_keys = split_keys;
    parts_ = pointers(nb::cast<std::vector<PlanPart*>>(parts));
  }
  // (o, lse or None); None for tensors whose layout kernels cannot read
  nb::object operator()(int threads, nb::handle q, nb::handle k, nb::handle v, bool want_lse) const {
    Call c = call_;
    if (!api_ || !read_tensor(*api_, q, c.q) || !read_tensor(*api_, k, c.k) || !read_tensor(*api_, v, c.v))
      return nb::none();
    NewTensor o(*api_, c.q.dtype, 4, c.B, c.Tq, c.Hq, c.Dv);
    std::optional<NewTensor> lse;
    if (want_lse) lse.emplace(*api_, c.q.dtype == DType::f64 ? DType::f64 : DType::f32, 3, c.B, c.Tq, c.Hq);
    c.o = {o.data(), {c.Tq * c.Hq * c.Dv, c.Hq * c.Dv, c.Dv, 1}, c.q.dtype};
    c.lse = lse ? lse->data() : nullptr;
    {
      const Unlocked unlocked;
      run(c, threads);
    }
    return nb::make_tuple(o.release(), lse ? lse->release() : nb::none());
  }
  // (dq, dk, dv), or None as above
  nb::object backward(int threads, int splits, nb::handle dout, nb::handle q, nb::handle k, nb::handle v,
                      nb::handle out, nb::handle lse, nb::handle dlse) const {
    Call c = call_;
    if (!api_ || !read_tensor(*api_, q, c.q) || !read_tensor(*api_, k, c.k) || !read_tensor(*api_, v, c.v) ||
        !read_tensor(*api_, dout, c.do_) || !read_tensor(*api_, out, c.o))
      return nb::none();
    c.lse = read_row_tensor(*api_, lse, c);
    c.dlse = dlse.is_none() ? nullptr : read_row_tensor(*api_, dlse, c);
    if (!c.lse || (!c.dlse && !dlse.is_none())) return nb::none();
    NewTensor dq(*api_, c.q.dtype, 4, c.B, c.Tq, c.Hq, c.D), dk(*api_, c.q.dtype, 4, c.B, c.Tk, c.Hk, c.D),
        dv(*api_, c.q.dtype, 4, c.B, c.Tk, c.Hk, c.Dv);
    c.dq = {dq.data(), {c.Tq * c.Hq * c.D, c.Hq * c.D, c.D, 1}, c.q.dtype};
    c.dk = {dk.data(), {c.Tk * c.Hk * c.D, c.Hk * c.D, c.D, 1}, c.q.dtype};
    c.dv = {dv.data(), {c.Tk * c.Hk * c.Dv, c.Hk * c.Dv, c.Dv, 1}, c.q.dtype};
    c.splits = splits;
    {
      const Unlocked unlocked;
      run_backward(c, parts_, threads);
    }
    return nb::make_tuple(dq.release(), dk.release(), dv.release());
  }

 private:
  void run(Call& c, int threads) const {
    if (c.split_keys > 0)
      run_decode(c, *parts_[0], threads);
    else
      run_forward(c, parts_, threads);
  }
  const Exchange* api_;
  nb::list kept_;
  std::vector<const Part*> parts_;
  Call call_;
};

void backward(const std::vector<PlanPart*>& parts, const Options& o, int threads, int splits, const In& dout,
              const In& q, const In& k, const In& v, const In& out, const In& lse, std::optional<In> dlse,
              std::optional<In> entropy, std::optional<In> dentropy, std::optional<Doubles> delta, const Any& dq,
              const Any& dk, const Any& dv, std::optional<Any> dbias, std::optional<Any> ddistances,
              std::optional<Any> dslopes, std::optional<Any> dgates, std::optional<Any> rows, const Extra& e) {
  Call c = make_call(o, e);
  c.do_ = view(dout), c.q = view(q), c.k = view(k), c.v = view(v), c.o = view(out);
  c.lse = const_cast<void*>(lse.data());
  if (dlse) c.dlse = dlse->data();
  if (dentropy) c.entropy = const_cast<void*>(entropy->data()), c.dentropy = dentropy->data();
  if (delta) c.delta = delta->data();
  if (rows) c.rows = static_cast<double*>(rows->data());
  c.dq = view(dq), c.dk = view(dk), c.dv = view(dv);
  c.splits = splits;
  if (dbias) {
    c.dbias = broadcast(*dbias);
    c.bias_b = dbias->shape(0) > 1, c.bias_h = dbias->shape(1) > 1, c.bias_t = dbias->shape(2) > 1;
  }
  if (ddistances) c.ddistances = by_distance(*ddistances, o);
  if (dslopes) c.dslopes = static_cast<double*>(dslopes->data());
  if (dgates) c.dgates = static_cast<double*>(dgates->data());
  const auto p = pointers(parts);
  const Unlocked unlocked;
  run_backward(c, p, threads);
}

void tangent(const std::vector<PlanPart*>& parts, const Options& o, int threads, const In& q, const In& k, const In& v,
             const In& out, const In& lse, std::optional<In> dq, std::optional<In> dk, std::optional<In> dv,
             const Any& dout, const Any& dlse, const Extra& e, const Extra& de) {
  Call c = make_call(o, e), d = make_call(o, de);
  c.q = view(q), c.k = view(k), c.v = view(v), c.o = view(out), c.lse = const_cast<void*>(lse.data());
  if (dq) d.q = view(*dq);
  if (dk) d.k = view(*dk);
  if (dv) d.v = view(*dv);
  d.o = view(dout), d.lse = dlse.data(), d.softcap = 0;
  const auto p = pointers(parts);
  const Unlocked unlocked;
  run_tangent(c, d, p, threads);
}

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

void append(const In& in, const Any& out, std::optional<Any> scale, int code, int64_t group, const Longs& first,
            const Longs& second, std::optional<In> cos, std::optional<In> sin, bool interleaved, int threads) {
  Append c;
  c.tokens = static_cast<int64_t>(in.shape(0)), c.heads = static_cast<int64_t>(in.shape(1));
  c.n = static_cast<int64_t>(in.shape(2));
  c.in = view(in), c.out = view(out, scale.has_value());
  if (scale) coded(c.out, *scale, Code(code), group);
  c.first = first.data(), c.second = second.data();
  if (cos) c.cos = cos->data(), c.sin = sin->data(), c.interleaved = interleaved;
  nb::gil_scoped_release unlocked;  // no interruption: it would leave half of the rows written
  run_append(c, threads);
}

}  // namespace

NB_MODULE(_core, m) {
  handle_forks();
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  at_forks(nullptr, [] { main_thread = PyThread_get_thread_ident(); });
  // torch's operator tables keep our callers, and with them planned calls, until the process exits
  nb::set_leak_warnings(false);
  nb::class_<PlanPart>(m, "Part").def("__init__", [](PlanPart* self, nb::handle source) {
    std::unique_ptr<PlanPart> p(read_part(source));
    new (self) PlanPart(std::move(*p));
    self->part.masks = self->masks.data();
  });
  nb::class_<Options>(m, "Options")
      .def("__init__", [](Options* self, int64_t B, int64_t Tq, int64_t Tk, int64_t Hq, int64_t Hk, int64_t D,
                          int64_t Dv, double scale, double softcap, double dropout, int64_t range) {
        new (self) Options{B, Tq, Tk, Hq, Hk, D, Dv, scale, softcap, dropout, range};
      });
  nb::class_<Extra>(m, "Extra")
      .def(
          "__init__",
          [](Extra* self, std::optional<In> bias, std::optional<Doubles> slopes, std::optional<Ints> offset,
             std::optional<Doubles> sinks, std::optional<Ints> block_table, int64_t page_size, uint64_t seed,
             std::optional<In> k_scale, std::optional<In> v_scale, int code, int64_t group, std::optional<In> distances,
             std::optional<In> gates, std::optional<Ints> selected, int64_t block, int64_t rows) {
            new (self) Extra{bias,    slopes,     offset, sinks,     block_table, page_size, seed,  k_scale,
                             v_scale, Code(code), group,  distances, gates,       selected,  block, rows};
          },
          nb::arg("bias").none(), nb::arg("slopes").none(), nb::arg("offset").none(), nb::arg("sinks").none(),
          nb::arg("block_table").none(), nb::arg("page_size"), nb::arg("seed"), nb::arg("k_scale").none() = nb::none(),
          nb::arg("v_scale").none() = nb::none(), nb::arg("code") = 0, nb::arg("group") = 0,
          nb::arg("distances").none() = nb::none(), nb::arg("gates").none() = nb::none(),
          nb::arg("selected").none() = nb::none(), nb::arg("block") = 1, nb::arg("rows") = 1);
  m.def("forward", &forward, nb::arg("parts"), nb::arg("options"), nb::arg("threads"), nb::arg("split_keys"),
        nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("lse"), nb::arg("max").none(),
        nb::arg("entropy").none(), nb::arg("extra"));
  m.def("backward", &backward, nb::arg("parts"), nb::arg("options"), nb::arg("threads"), nb::arg("splits"),
        nb::arg("do"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("lse"), nb::arg("dlse").none(),
        nb::arg("entropy").none(), nb::arg("dentropy").none(), nb::arg("delta").none(), nb::arg("dq"), nb::arg("dk"),
        nb::arg("dv"), nb::arg("dbias").none(), nb::arg("ddistances").none(), nb::arg("dslopes").none(),
        nb::arg("dgates").none(), nb::arg("rows").none(), nb::arg("extra"));
  m.def("tangent", &tangent, nb::arg("parts"), nb::arg("options"), nb::arg("threads"), nb::arg("q"), nb::arg("k"),
        nb::arg("v"), nb::arg("o"), nb::arg("lse"), nb::arg("dq").none(), nb::arg("dk").none(), nb::arg("dv").none(),
        nb::arg("do"), nb::arg("dlse"), nb::arg("extra"), nb::arg("tangents"));
  m.def("append", &append, nb::arg("given"), nb::arg("held"), nb::arg("scale").none(), nb::arg("code"),
        nb::arg("group"), nb::arg("first"), nb::arg("second"), nb::arg("cos").none(), nb::arg("sin").none(),
        nb::arg("interleaved"), nb::arg("threads"));
  bind_recurrent(m);
  bind_diagonal(m);
  bind_ffi(m);
  m.def("isas", &available_isas);
  m.def("isa", [] { return std::string(current_set().name); });
  m.def("set_isa", &set_isa);
  nb::class_<Direct>(m, "Direct")
      .def(nb::init<nb::handle, nb::list, const Options&, int64_t>())
      .def("__call__", &Direct::operator())
      .def("backward", &Direct::backward, nb::arg("threads"), nb::arg("splits"), nb::arg("do"), nb::arg("q"),
           nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("lse"), nb::arg("dlse").none());
  m.def("live_workers", &live_workers);
  m.def("join_team", [](uintptr_t gomp_parallel, uintptr_t pause) {
    join_team(reinterpret_cast<void*>(gomp_parallel), reinterpret_cast<void*>(pause));
  });
  m.def("probe_flops", &probe_flops, nb::call_guard<nb::gil_scoped_release>());
  m.def("probe_stream", [](Any a, int threads) {
    nb::gil_scoped_release unlocked;
    return probe_stream(static_cast<char*>(a.data()), static_cast<int64_t>(a.nbytes()), threads);
  });
}
