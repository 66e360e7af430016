// runs jobs on a device of the browser: the launcher's steps, its buffers as base64, the same WGSL texts

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const base64 = (array) => {
  let text = '';
  // the number of arguments of a call is limited
  for (let i = 0; i < array.length; i += 32768) text += String.fromCharCode(...array.subarray(i, i + 32768));
  return btoa(text);
};

const adapter = await navigator.gpu.requestAdapter();
const buffers = Math.min(10, adapter.limits.maxStorageBuffersPerShaderStage);
const device = await adapter.requestDevice({ requiredLimits: { maxStorageBuffersPerShaderStage: buffers } });
const pipelines = new Map();

async function pipelineOf({ text, entry, kinds }) {
  const key = `${entry}\n${text}`;
  if (!pipelines.has(key)) {
    const module = device.createShaderModule({ code: text });
    const { messages } = await module.getCompilationInfo();
    const wrong = messages.filter((m) => m.type === 'error').map((m) => `${m.lineNum}:${m.linePos} ${m.message}`);
    if (wrong.length) throw new Error(wrong.join('; '));
    const entries = kinds.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } }));
    const layout = device.createPipelineLayout({ bindGroupLayouts: [device.createBindGroupLayout({ entries })] });
    pipelines.set(key, await device.createComputePipelineAsync({ layout, compute: { module, entryPoint: entry } }));
  }
  return pipelines.get(key);
}

// {buffers: [base64], steps: [{text, entry, kinds, bindings: [[buffer, offset, size]], grid}], reads: [buffer]}
async function run(job) {
  device.pushErrorScope('validation');
  const { STORAGE, UNIFORM, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
  const held = job.buffers.map((text) => {
    const data = bytes(text);
    const buffer = device.createBuffer({ size: data.length, usage: STORAGE | UNIFORM | COPY_SRC | COPY_DST });
    device.queue.writeBuffer(buffer, 0, data);
    return buffer;
  });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  for (const step of job.steps) {
    const pipeline = await pipelineOf(step);
    const entries = step.bindings.map(([n, offset, size], binding) => (
      { binding, resource: { buffer: held[n], offset, size } }));
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(...step.grid);
  }
  pass.end();
  const staged = job.reads.map((n) => {
    const buffer = device.createBuffer({ size: held[n].size, usage: MAP_READ | COPY_DST });
    encoder.copyBufferToBuffer(held[n], 0, buffer, 0, held[n].size);
    return buffer;
  });
  device.queue.submit([encoder.finish()]);
  const error = await device.popErrorScope();
  if (error) throw new Error(error.message);
  const read = [];
  for (const buffer of staged) {
    await buffer.mapAsync(GPUMapMode.READ);
    read.push(base64(new Uint8Array(buffer.getMappedRange())));
  }
  [...held, ...staged].forEach((buffer) => buffer.destroy());
  return read;
}

// a test's request: the device's limits, or the server's job
window.limits = () => {
  const found = {};
  for (const name in device.limits) found[name] = device.limits[name];
  return found;
};
window.runJob = async () => run(await (await fetch('job.json')).json());
window.ready = true;
