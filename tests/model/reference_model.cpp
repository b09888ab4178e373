#include "tests/model/reference_model.h"

#include <cmath>

namespace sb::test {

ReferenceModel::ReferenceModel(const ModelConfig& config, const ParameterSet& parameters)
    : config_(config), frequencies_(rope_frequencies(config.rope, config.head_dim)) {
  for (int i = 0; i < parameters.count(); ++i) {
    for (const Parameter::Part& part : parameters.parameter(i).parts) {
      const TensorView rows = parameters.value(i).rows(part.row_begin, part.row_end);
      tensors_[part.hf_name] = {rows.f32(), rows.f32() + rows.elements()};
    }
  }
}

ReferenceModel::Rows ReferenceModel::linear(const Rows& x, const std::string& name) const {
  const std::vector<double>& weight = tensor(name + ".weight");
  const auto bias = tensors_.find(name + ".bias");
  const size_t inputs = x[0].size(), outputs = weight.size() / inputs;
  Rows y(x.size(), std::vector<double>(outputs));
  for (size_t t = 0; t < x.size(); ++t) {
    for (size_t o = 0; o < outputs; ++o) {
      if (bias != tensors_.end()) y[t][o] = bias->second[o];
      for (size_t i = 0; i < inputs; ++i) y[t][o] += weight[o * inputs + i] * x[t][i];
    }
  }
  return y;
}

void ReferenceModel::norm(std::vector<double>& row, const std::string& weight) const {
  double squares = 0;
  for (const double x : row) squares += x * x;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(row.size()) + double{config_.rms_norm_eps});
  for (size_t i = 0; i < row.size(); ++i) row[i] *= scale * tensor(weight)[i];
}

void ReferenceModel::rotate(std::vector<double>& head, int64_t position) const {
  const size_t half = head.size() / 2;
  for (size_t c = 0; c < half; ++c) {
    const double angle = static_cast<double>(position) * frequencies_.inverse[c];
    const double cos = std::cos(angle) * frequencies_.attention_scaling;
    const double sin = std::sin(angle) * frequencies_.attention_scaling;
    const double a = head[c], b = head[c + half];
    head[c] = a * cos - b * sin;
    head[c + half] = b * cos + a * sin;
  }
}

ReferenceModel::Rows ReferenceModel::attention(const Rows& x, const std::string& layer) const {
  const auto d = static_cast<size_t>(config_.head_dim);
  // [token][head][channel]
  const auto heads = [&](const Rows& projection, int count, const char* norm_name, bool rotated) {
    std::vector<Rows> result;
    for (size_t t = 0; t < projection.size(); ++t) {
      Rows token;
      for (size_t h = 0; h < static_cast<size_t>(count); ++h) {
        const auto begin = projection[t].begin() + static_cast<std::ptrdiff_t>(h * d);
        std::vector<double> head(begin, begin + static_cast<std::ptrdiff_t>(d));
        if (config_.qk_norm && rotated) norm(head, layer + norm_name);
        if (rotated) rotate(head, static_cast<int64_t>(t));
        token.push_back(std::move(head));
      }
      result.push_back(std::move(token));
    }
    return result;
  };
  const auto q = heads(linear(x, layer + "self_attn.q_proj"), config_.heads, "self_attn.q_norm.weight", true);
  const auto k = heads(linear(x, layer + "self_attn.k_proj"), config_.kv_heads, "self_attn.k_norm.weight", true);
  const auto v = heads(linear(x, layer + "self_attn.v_proj"), config_.kv_heads, "", false);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  Rows out(x.size(), std::vector<double>(static_cast<size_t>(config_.heads) * d));
  for (size_t t = 0; t < x.size(); ++t) {
    for (size_t h = 0; h < static_cast<size_t>(config_.heads); ++h) {
      const size_t kv = h / static_cast<size_t>(config_.group());
      double sum = 0;
      std::vector<double> mixed(d);
      for (size_t j = 0; j <= t; ++j) {
        double score = 0;
        for (size_t c = 0; c < d; ++c) score += q[t][h][c] * k[j][kv][c];
        const double e = std::exp(score * scale);
        sum += e;
        for (size_t c = 0; c < d; ++c) mixed[c] += e * v[j][kv][c];
      }
      for (size_t c = 0; c < d; ++c) out[t][h * d + c] = mixed[c] / sum;
    }
  }
  return linear(out, layer + "self_attn.o_proj");
}

ReferenceModel::Rows ReferenceModel::mlp(const Rows& x, const std::string& layer) const {
  Rows gate = linear(x, layer + "mlp.gate_proj");
  const Rows up = linear(x, layer + "mlp.up_proj");
  for (size_t t = 0; t < x.size(); ++t) {
    for (size_t i = 0; i < gate[t].size(); ++i) gate[t][i] *= up[t][i] / (1 + std::exp(-gate[t][i]));
  }
  return linear(gate, layer + "mlp.down_proj");
}

ReferenceModel::Rows ReferenceModel::sequence_logits(const std::vector<int32_t>& tokens) const {
  const auto hidden = static_cast<size_t>(config_.hidden_size);
  Rows x;
  for (const int32_t token : tokens) {
    const auto row =
        tensor("model.embed_tokens.weight").begin() + static_cast<std::ptrdiff_t>(token) * config_.hidden_size;
    x.emplace_back(row, row + static_cast<std::ptrdiff_t>(hidden));
  }
  const auto normed = [&](const std::string& weight) {
    Rows rows = x;
    for (std::vector<double>& row : rows) norm(row, weight);
    return rows;
  };
  const auto add = [&](const Rows& rows) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < hidden; ++i) x[t][i] += rows[t][i];
    }
  };
  for (int l = 0; l < config_.layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    add(attention(normed(layer + "input_layernorm.weight"), layer));
    add(mlp(normed(layer + "post_attention_layernorm.weight"), layer));
  }
  return linear(normed("model.norm.weight"), config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head");
}

std::vector<double> ReferenceModel::logits(const MicroBatch& batch) const {
  std::vector<double> all;
  for (int s = 0; s < batch.sequences(); ++s) {
    const auto begin = batch.tokens.begin();
    for (const auto& row : sequence_logits({begin + batch.cu_seqlens[s], begin + batch.cu_seqlens[s + 1]})) {
      all.insert(all.end(), row.begin(), row.end());
    }
  }
  return all;
}

double ReferenceModel::loss(const MicroBatch& batch) const {
  const std::vector<double> all = logits(batch);
  const auto vocabulary = static_cast<size_t>(config_.vocab_size);
  double sum = 0;
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    if (batch.labels[t] < 0) continue;
    const double* row = &all[t * vocabulary];
    double partition = 0;
    for (size_t c = 0; c < vocabulary; ++c) partition += std::exp(row[c]);
    sum += double{batch.weights[t]} * (std::log(partition) - row[batch.labels[t]]);
  }
  return sum;
}

}  // namespace sb::test
