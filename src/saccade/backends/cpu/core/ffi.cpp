// Attention as handlers of XLA's foreign function interface, which JAX calls without Python. All that a call needs is
// in its buffers and attributes, its plan included, so that other processes can run a compiled program too.
#include "ffi.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "bind.hpp"
#include "dispatch.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace saccade {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;
using Doubles = std::vector<double>;

// number of threads of a call, which has no Python to ask
std::atomic<int> ffi_threads{static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};

int64_t dim(const Buffer& b, size_t i) { return b.dimensions()[i]; }
int64_t count(const Buffer& b) { return static_cast<int64_t>(b.element_count()); }

// a contiguous buffer; broadcast: dimensions of size 1 have stride 0
Array view(const Buffer& b, bool broadcast = false) {
  Array x;
  x.data = static_cast<char*>(b.untyped_data());
  x.dtype = b.element_type() == ffi::F32    ? DType::f32
            : b.element_type() == ffi::BF16 ? DType::bf16
            : b.element_type() == ffi::F16  ? DType::f16
                                            : DType::f64;
  int64_t stride = 1;
  for (size_t i = b.dimensions().size(); i-- > 0; stride *= dim(b, i))
    x.stride[i] = broadcast && dim(b, i) == 1 ? 0 : stride;
  return x;
}

double number(const Buffer& b, int64_t i) {
  return b.element_type() == ffi::F64 ? static_cast<const double*>(b.untyped_data())[i]
                                      : static_cast<const float*>(b.untyped_data())[i];
}

Doubles numbers(const Buffer& b) {
  Doubles x(count(b));
  for (size_t i = 0; i < x.size(); ++i) x[i] = number(b, i);
  return x;
}

void put(const Buffer& to, int64_t i, double x) {
  if (to.element_type() == ffi::F64)
    static_cast<double*>(to.untyped_data())[i] = x;
  else
    static_cast<float*>(to.untyped_data())[i] = static_cast<float>(x);
}

void clear(const Buffer& b) { std::memset(b.untyped_data(), 0, b.size_bytes()); }

const int32_t* ints(const Buffer& b) { return static_cast<const int32_t*>(b.untyped_data()); }

// what forward and backward read besides their rows; an array that the call does not have is empty
struct Inputs {
  Buffer q, k, v, plan;
  // [1 | B, 1 | Hq, 1 | Tq, 1 | Tk], [1 | B, Hq], [Hq], [1 | B, Hq, R], [B, Tk, Hq], in the type of lse
  Buffer bias, slopes, sinks, table, log_f;
  // [1 | B], [1 | B, Hk, groups, n], and the two words of the seed
  Buffer offset, selected, seed;
};

struct Scores {
  double scale, softcap, dropout;
  // index of distance 0 in the table; sizes of the blocks of selected keys
  int64_t origin, block, rows;
};

// a call of the core with the arrays that it does not own
struct Prepared {
  Call call;
  EncodedPlan plan;
  Doubles slopes, sinks, gates;
  std::vector<char> distances;
  int64_t by_distance, origin;

  Prepared(const Inputs& in, const Scores& s) : plan(ints(in.plan), count(in.plan)), origin(s.origin) {
    Call& c = call;
    c.B = dim(in.q, 0), c.Tq = dim(in.q, 1), c.Hq = dim(in.q, 2), c.D = dim(in.q, 3);
    c.Tk = dim(in.k, 1), c.Hk = dim(in.k, 2), c.Dv = dim(in.v, 3), c.G = c.Hq / c.Hk;
    c.scale = s.scale, c.softcap = s.softcap;
    c.drop_below = static_cast<uint32_t>(s.dropout * 4294967296.0), c.keep_scale = 1.0 / (1.0 - s.dropout);
    c.seed[0] = ints(in.seed)[0], c.seed[1] = ints(in.seed)[1];
    c.q = view(in.q), c.k = view(in.k), c.v = view(in.v);
    c.threads = ffi_threads;
    if (count(in.bias)) c.bias = view(in.bias, true);
    if (count(in.slopes)) {
      slopes = numbers(in.slopes);
      c.slopes = slopes.data(), c.slopes_stride = dim(in.slopes, 0) > 1 ? c.Hq : 0;
    }
    if (count(in.sinks)) sinks = numbers(in.sinks), c.sinks = sinks.data();
    c.offset = ints(in.offset), c.offset_stride = count(in.offset) > 1 ? 1 : 0;
    by_distance = c.Tq + 2 * c.Tk - 1;
    if (count(in.table)) {
      const Array table = view(in.table);
      const int64_t R = dim(in.table, 2), n = dim(in.table, 0) * c.Hq * by_distance;
      distances.resize(n * table.unit());
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(&distances[i * table.unit()],
                    table.data + (i / by_distance * R + place(i % by_distance, R)) * table.unit(), table.unit());
      c.distances = of_distances(distances.data(), table.dtype, dim(in.table, 0));
    }
    if (count(in.log_f)) {
      // running sums, [B, Hq, Tk]
      gates.resize(c.B * c.Hq * c.Tk);
      for (int64_t i = 0; i < c.B * c.Hq; ++i)
        for (int64_t j = 0; j < c.Tk; ++j)
          gates[i * c.Tk + j] =
              number(in.log_f, (i / c.Hq * c.Tk + j) * c.Hq + i % c.Hq) + (j ? gates[i * c.Tk + j - 1] : 0.0);
      c.gates = {reinterpret_cast<char*>(gates.data()), {c.Hq * c.Tk, c.Tk, 1, 0}, DType::f64};
    }
    if (count(in.selected)) {
      const int64_t groups = dim(in.selected, 2), n = dim(in.selected, 3);
      c.selection = {ints(in.selected), dim(in.selected, 0) > 1 ? c.Hk * groups * n : 0, groups, n, s.block, s.rows};
    }
  }

  // the index in a table of R numbers of a distance, counted from the smallest
  int64_t place(int64_t distance, int64_t R) const {
    return std::clamp<int64_t>(distance - (call.Tq + call.Tk - 1) + origin, 0, R - 1);
  }
  // numbers [batches, Hq, by_distance] as (batch, head, position of the row, key); the last is that of key Tk - 1
  Array of_distances(char* numbers, DType type, int64_t batches) const {
    Array x{numbers, {batches > 1 ? call.Hq * by_distance : 0, by_distance, 1, -1}, type};
    x.data += (by_distance - call.Tk) * x.unit();
    return x;
  }
};

template <class F>
ffi::Error caught(F body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error forward(Buffer q, Buffer k, Buffer v, Buffer plan, Buffer bias, Buffer slopes, Buffer sinks, Buffer table,
                   Buffer log_f, Buffer offset, Buffer selected, Buffer seed, Result o, Result lse, double scale,
                   double softcap, double dropout, int64_t origin, int64_t block, int64_t rows, int64_t split_keys) {
  return caught([&] {
    if (!count(*lse)) return;
    Prepared x({q, k, v, plan, bias, slopes, sinks, table, log_f, offset, selected, seed},
               {scale, softcap, dropout, origin, block, rows});
    Call& c = x.call;
    c.o = view(*o), c.lse = lse->untyped_data(), c.split_keys = split_keys;
    const auto parts = x.plan.parts();
    if (split_keys > 0)
      run_decode(c, *parts.at(0), c.threads);
    else
      run_forward(c, parts, c.threads);
  });
}

// gradients of side arrays are empty if they are not needed
struct Gradients {
  Buffer bias, slopes, sinks, table, log_f;
};

// sums of gradients that have another form than their results
struct Sums {
  Doubles bias, slopes, table, log_f, rows;

  Sums(Prepared& x, const Gradients& d, int64_t owners) {
    Call& c = x.call;
    const int64_t items = c.B * c.Hk * owners * c.G;
    if (count(d.bias)) {
      clear(d.bias);
      c.bias_b = dim(d.bias, 0) > 1, c.bias_h = dim(d.bias, 1) > 1, c.bias_t = dim(d.bias, 2) > 1;
      c.dbias = view(d.bias, true);
      if (count(d.bias) != c.B * c.Hq * c.Tq * c.Tk) {
        bias.resize(count(d.bias));
        c.dbias.data = reinterpret_cast<char*>(bias.data()), c.dbias.dtype = DType::f64;
      }
    }
    if (count(d.slopes)) slopes.resize(items), c.dslopes = slopes.data();
    if (count(d.table)) {
      table.resize(dim(d.table, 0) * c.Hq * x.by_distance);
      c.ddistances = x.of_distances(reinterpret_cast<char*>(table.data()), DType::f64, dim(d.table, 0));
    }
    if (count(d.log_f)) log_f.resize(items * c.Tk), c.dgates = log_f.data();
    if (count(d.sinks)) rows.resize(c.B * c.Tq * c.Hq * 2), c.rows = rows.data();
  }

  // the sum over owners of number i of n, for batch entry and head bh of [B, Hk, owners, G, n]
  static double over_owners(const Doubles& sums, const Call& c, int64_t owners, int64_t bh, int64_t n, int64_t i) {
    double sum = 0;
    for (int64_t s = 0; s < owners; ++s) sum += sums[((bh / c.G * owners + s) * c.G + bh % c.G) * n + i];
    return sum;
  }

  void finish(const Prepared& x, const Gradients& d, int64_t owners) const {
    const Call& c = x.call;
    for (size_t i = 0; i < bias.size(); ++i) put(d.bias, i, bias[i]);
    if (count(d.slopes)) {
      Doubles sum(count(d.slopes));
      for (int64_t bh = 0; bh < c.B * c.Hq; ++bh) sum[bh % sum.size()] += over_owners(slopes, c, owners, bh, 1, 0);
      for (size_t i = 0; i < sum.size(); ++i) put(d.slopes, i, sum[i]);
    }
    if (count(d.sinks)) {
      Doubles sum(c.Hq);
      // minus the sink's weight times delta; rows are (lse in units of log 2, delta)
      for (int64_t i = 0; i < c.B * c.Tq * c.Hq; ++i)
        sum[i % c.Hq] -= std::exp2(x.sinks[i % c.Hq] * 1.4426950408889634 - rows[2 * i]) * rows[2 * i + 1];
      for (int64_t h = 0; h < c.Hq; ++h) put(d.sinks, h, sum[h]);
    }
    if (count(d.table)) {
      const int64_t R = dim(d.table, 2);
      Doubles sum(count(d.table));
      for (int64_t i = 0; i < static_cast<int64_t>(table.size()); ++i)
        sum[i / x.by_distance * R + x.place(i % x.by_distance, R)] += table[i];
      for (size_t i = 0; i < sum.size(); ++i) put(d.table, i, sum[i]);
    }
    if (count(d.log_f))
      for (int64_t bh = 0; bh < c.B * c.Hq; ++bh) {
        // a gate is part of the sums of its own and all later positions
        double sum = 0;
        for (int64_t j = c.Tk; j-- > 0;) {
          sum += over_owners(log_f, c, owners, bh, c.Tk, j);
          put(d.log_f, (bh / c.Hq * c.Tk + j) * c.Hq + bh % c.Hq, sum);
        }
      }
  }
};

ffi::Error backward(Buffer q, Buffer k, Buffer v, Buffer plan, Buffer bias, Buffer slopes, Buffer sinks, Buffer table,
                    Buffer log_f, Buffer offset, Buffer selected, Buffer seed, Buffer o, Buffer lse, Buffer dout,
                    Buffer dlse, Result dq, Result dk, Result dv, Result dbias, Result dslopes, Result dsinks,
                    Result dtable, Result dlog_f, double scale, double softcap, double dropout, int64_t origin,
                    int64_t block, int64_t rows, int64_t owners) {
  return caught([&] {
    Prepared x({q, k, v, plan, bias, slopes, sinks, table, log_f, offset, selected, seed},
               {scale, softcap, dropout, origin, block, rows});
    Call& c = x.call;
    const Gradients d{*dbias, *dslopes, *dsinks, *dtable, *dlog_f};
    for (const Buffer& b : {*dq, *dk, *dv}) clear(b);
    Sums sums(x, d, owners);
    c.o = view(o), c.lse = lse.untyped_data(), c.do_ = view(dout), c.splits = static_cast<int>(owners);
    c.dlse = count(dlse) ? dlse.untyped_data() : nullptr;
    c.dq = view(*dq), c.dk = view(*dk), c.dv = view(*dv);
    if (c.B && c.Hq) run_backward(c, x.plan.parts(), c.threads);
    sums.finish(x, d, owners);
  });
}

// the twelve buffers of Inputs, and the attributes of Scores
template <class B>
auto with_inputs(B binding) {
  return std::move(binding)
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>();
}

template <class B>
auto with_scores(B binding) {
  return std::move(binding)
      .template Attr<double>("scale")
      .template Attr<double>("softcap")
      .template Attr<double>("dropout")
      .template Attr<int64_t>("origin")
      .template Attr<int64_t>("block")
      .template Attr<int64_t>("rows");
}

XLA_FFI_DEFINE_HANDLER(
    handle_forward, forward,
    with_scores(with_inputs(ffi::Ffi::Bind()).Ret<Buffer>().Ret<Buffer>()).Attr<int64_t>("split_keys"));
XLA_FFI_DEFINE_HANDLER(handle_backward, backward,
                       with_scores(with_inputs(ffi::Ffi::Bind())
                                       .Arg<Buffer>()
                                       .Arg<Buffer>()
                                       .Arg<Buffer>()
                                       .Arg<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>()
                                       .Ret<Buffer>())
                           .Attr<int64_t>("owners"));

}  // namespace

void bind_ffi(nb::module_& m) {
  m.attr("WORDS_VERSION") = WORDS_VERSION;
  m.def("ffi_handlers", [] {
    nb::dict handlers;
    handlers["saccade_forward"] = nb::capsule(reinterpret_cast<void*>(handle_forward));
    handlers["saccade_backward"] = nb::capsule(reinterpret_cast<void*>(handle_backward));
    return handlers;
  });
  m.def("set_ffi_threads", [](int n) { ffi_threads = n; });
}

}  // namespace saccade
