{# the place of a workgroup that owns query rows, and its list of key segments #}
  let cg = tid % {{ CG }}u;
  let rg = tid / {{ CG }}u;
  let b = dims.first_batch + group.z;
  let h = group.x;
  // the last tiles first: under a causal mask they have the most to do
  let tile = dims.first_tile + dims.tile_count - 1u - group.y % dims.tile_count;
  let cls = group.y / dims.tile_count;
  i_b = b;
  place_class(cls);
  place_head(h);
  // bounds of loops with barriers are read from the side buffer, where compilers see that they are uniform
  let k_low = in_class(dims.k_lo, u32(side[dims.o_classes + 4u * cls + 1u]));
  let k_high = in_class(dims.k_hi, u32(side[dims.o_classes + 4u * cls + 1u]));
  let a0 = tile * {{ ROWS }}u;
  let list = dims.o_ptr + ((cls * dims.n_masks + u32(side[dims.o_heads + h])) * dims.mask_batches + select(0u, b, dims.mask_batches > 1u)) * dims.n_tiles + tile;
