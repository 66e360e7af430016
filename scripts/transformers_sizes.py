"""Small sizes for the fields of transformers' configurations, by the name of the field."""

from __future__ import annotations

VOCAB, IMAGE = 99, 32
# for fields that are integers: a number, and the names of the fields that get it
_NAMES = {
    1: """
        attn_layer_offset expert_layer_offset first_k_dense_replace n_group n_shared_experts
        num_dense_layers num_expert_group num_nextn_predict_layers topk_group
    """,
    2: """
        attn_layer_period decoder_layers decoder_num_hidden_layers decoder_num_layers depth encoder_layers
        encoder_num_hidden_layers encoder_num_layers expert_layer_period full_attention_interval
        index_topk_blocks l_layers mamba_n_heads moe_k moe_topk n_layer n_layers num_block_layers num_blocks
        num_conformer_blocks num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token
        num_frames num_hidden_layers num_latents num_layers num_query_tokens num_rnn_layers num_x_layers
        postnet_layers prenet_layers r_layers text_layers top_k vision_layers x_layers
    """,
    4: """
        attention_heads decoder_attention_heads decoder_num_attention_heads decoder_num_heads
        encoder_attention_heads encoder_num_attention_heads encoder_num_heads index_n_heads index_topk
        linear_num_key_heads linear_num_value_heads moe_num_experts n_head n_heads n_routed_experts
        num_attention_heads num_experts num_global_attention_heads num_heads num_local_experts
        num_routed_experts num_vision_heads swa_num_attention_heads text_num_heads window_size
    """,
    7: """
        attention_window_size local_attention sliding_window
    """,
    8: """
        attention_chunk_size attention_head_dim attention_head_size attention_key_dim attention_window
        attn_head_dim chunk_size d_kv decoder_head_dim encoder_head_dim global_head_dim head_dim
        hidden_size_per_layer_input image_seq_length index_head_dim kv_channels linear_key_head_dim
        linear_value_head_dim num_mel_bins num_queries patch_size qk_nope_head_dim qk_rope_head_dim
        relative_attention_num_buckets rotary_dim swa_head_dim swa_v_head_dim v_head_dim
    """,
    16: """
        kv_lora_rank mamba_d_ssm mamba_d_state o_lora_rank q_lora_rank ssm_state_size state_size
        time_step_rank
    """,
    32: """
        attention_hidden_size audio_hidden_size backbone_hidden_size bottleneck_size connector_hidden_size
        conv_dim cross_attention_hidden_size d_emb d_embed d_model decoder_dim decoder_hidden_size dim
        emb_dim embed_dim embedding_size encoder_dim encoder_hidden_size entity_emb_size feature_size
        fpn_hidden_size hidden_channels hidden_dim hidden_size image_hidden_size image_size img_size
        input_size kv_dim lru_width mask_feature_size model_dim n_embd neck_hidden_sizes out_hidden_size
        output_dim output_hidden_size projection_dim projector_hidden_size projector_input_dim
        projector_output_dim qformer_hidden_size resolution text_config_hidden_size text_embed_dim
        text_hidden_size vision_embed_dim vision_hidden_size vision_output_dim word_embed_proj_dim
    """,
    48: """
        block_ff_dim d_ff decoder_ffn_dim decoder_intermediate_size dense_intermediate_size dff
        dim_feedforward dim_ff encoder_ffn_dim encoder_intermediate_dim encoder_intermediate_size
        expert_intermediate_size feed_forward_size feedforward_size ffn_dim ffn_hidden_size intermediate_dim
        intermediate_size intermediate_size_mlp mlp_dim mlp_hidden_size moe_ffn_hidden_size
        moe_intermediate_size moe_shared_expert_intermediate_size n_inner projector_intermediate_size
        shared_expert_intermediate_size shared_intermediate_size
    """,
    64: """
        codebook_size max_2d_position_embeddings max_position_embeddings max_position_embeddings_vision
        max_seq_len max_seq_length max_sequence_length max_source_positions max_target_positions n_ctx
        n_positions seq_length
    """,
    VOCAB: """
        audio_vocab_size entity_vocab_size image_vocab_size text_vocab_size vocab_size
        vocab_size_per_layer_input
    """,
}
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
# for fields that are lists of integers: a number for each entry
LISTS = {
    **dict.fromkeys(
        ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "embed_dim_per_stage"), (16, 32, 32, 32, 32)
    ),
    **dict.fromkeys(("depths", "num_layers_per_stage", "blocks_per_stage", "depth_per_stage"), (1, 1, 1, 1, 1)),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_attention_heads_per_stage"), (2, 2, 2, 2, 2)),
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv_head", "multi_query_group_num", "n_head_kv")
