// this browser's GPU: one device, and jobs run on it as the library's launcher would submit them

import { bytes } from './ui.js';

const WANTED = {
  'max-storage-buffers-per-shader-stage': ['maxStorageBuffersPerShaderStage', 10],
  'max-compute-workgroup-storage-size': ['maxComputeWorkgroupStorageSize', 65536],
  'max-compute-invocations-per-workgroup': ['maxComputeInvocationsPerWorkgroup', 256],
  'max-storage-buffer-binding-size': ['maxStorageBufferBindingSize', 1 << 30],
  'max-compute-workgroups-per-dimension': ['maxComputeWorkgroupsPerDimension', 65535],
};

export const MISSING = 'This browser does not support WebGPU, so the kernels cannot run here. Current Chrome and Edge support it, and Safari from version 26; Firefox needs dom.webgpu.enabled in about:config. On Linux, Chrome may need --enable-unsafe-webgpu and a Vulkan driver.';

let opening = null;
// {device, name, software, limits, clock}; throws with a readable message where there is none
export function gpu() {
  opening ??= open().catch((error) => {
    opening = null;
    throw error;
  });
  return opening;
}

async function open() {
  if (!navigator.gpu) throw new Error(MISSING);
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) throw new Error('This browser supports WebGPU but found no adapter: there is no GPU, or the browser blocks its driver. chrome://gpu says which.');
  const limits = {};
  const requiredLimits = {};
  for (const [name, [field, most]] of Object.entries(WANTED)) limits[name] = requiredLimits[field] = Math.min(most, adapter.limits[field]);
  const clock = adapter.features.has('timestamp-query');
  const device = await adapter.requestDevice({ requiredLimits, requiredFeatures: clock ? ['timestamp-query'] : [] });
  device.lost.then(() => { opening = null; });
  const { vendor, architecture, device: model, description } = adapter.info;
  const given = description || [vendor, architecture, model].filter(Boolean).join(' ');
  const software = Boolean(adapter.info.isFallbackAdapter ?? adapter.isFallbackAdapter) || /swiftshader|llvmpipe/i.test(given);
  return { device, name: given || 'an adapter that does not give its name', software, limits, clock, pipelines: new Map() };
}

async function pipelineOf(here, text, { entry, kinds }) {
  const key = `${entry}\n${text}`;
  if (!here.pipelines.has(key)) {
    const module = here.device.createShaderModule({ code: text });
    const { messages } = await module.getCompilationInfo();
    const wrong = messages.filter((m) => m.type === 'error').map((m) => `${m.lineNum}:${m.linePos} ${m.message}`);
    if (wrong.length) throw new Error(`This browser refuses the kernel ${entry}: ${wrong.join('; ')}`);
    const entries = kinds.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } }));
    const layout = here.device.createPipelineLayout({ bindGroupLayouts: [here.device.createBindGroupLayout({ entries })] });
    here.pipelines.set(key, await here.device.createComputePipelineAsync({ layout, compute: { module, entryPoint: entry } }));
  }
  return here.pipelines.get(key);
}

// runs a job of the server: first once, whose outputs are read, then again to be timed.
// gives {arrays: name -> Float32Array, compile, milliseconds: [...], byClock}
export async function run(here, job, names, seconds = 1) {
  const { device } = here;
  const begin = performance.now();
  device.pushErrorScope('validation');
  const pipelines = [];
  for (const step of job.steps) pipelines.push(await pipelineOf(here, job.texts[step.text], step));
  const compile = performance.now() - begin;
  const { STORAGE, UNIFORM, COPY_SRC, COPY_DST } = GPUBufferUsage;
  const held = job.buffers.map(({ size, data }) => {
    const buffer = device.createBuffer({ size, usage: STORAGE | UNIFORM | COPY_SRC | COPY_DST });
    if (data) device.queue.writeBuffer(buffer, 0, bytes(data));
    return buffer;
  });
  const groups = job.steps.map((step, n) => device.createBindGroup({
    layout: pipelines[n].getBindGroupLayout(0),
    entries: step.bindings.map(([m, offset, size], binding) => ({ binding, resource: { buffer: held[m], offset, size } })),
  }));
  const once = (encoder, timestampWrites) => {
    const pass = encoder.beginComputePass(timestampWrites ? { timestampWrites } : undefined);
    job.steps.forEach((step, n) => {
      pass.setPipeline(pipelines[n]);
      pass.setBindGroup(0, groups[n]);
      pass.dispatchWorkgroups(...step.grid);
    });
    pass.end();
  };
  const encoder = device.createCommandEncoder();
  once(encoder);
  device.queue.submit([encoder.finish()]);
  const arrays = {};
  for (const name of names) {
    const { buffer, shape } = job.arrays[name];
    arrays[name] = new Float32Array(await read(device, held[buffer], 4 * shape.reduce((a, b) => a * b, 1)));
  }
  const error = await device.popErrorScope();
  if (error) throw new Error(`This browser refuses the call: ${error.message}`);
  const milliseconds = await timed(here, once, seconds);
  held.forEach((buffer) => buffer.destroy());
  return { arrays, compile, milliseconds, byClock: here.clock };
}

async function read(device, buffer, size) {
  const staged = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  const encoder = device.createCommandEncoder();
  encoder.copyBufferToBuffer(buffer, 0, staged, 0, size);
  device.queue.submit([encoder.finish()]);
  await staged.mapAsync(GPUMapMode.READ);
  const copy = staged.getMappedRange().slice(0);
  staged.destroy();
  return copy;
}

// milliseconds of each of 3 to 50 runs, by the device's clock where it has one, else until it says it is done
async function timed(here, once, seconds) {
  const { device, clock } = here;
  const found = [];
  const queries = clock && device.createQuerySet({ type: 'timestamp', count: 2 });
  const ticks = clock && device.createBuffer({ size: 16, usage: GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC });
  const begin = performance.now();
  while (found.length < 3 || (found.length < 50 && performance.now() - begin < 1000 * seconds)) {
    const started = performance.now();
    const encoder = device.createCommandEncoder();
    once(encoder, clock && { querySet: queries, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 });
    if (clock) encoder.resolveQuerySet(queries, 0, 2, ticks, 0);
    device.queue.submit([encoder.finish()]);
    await device.queue.onSubmittedWorkDone();
    let took = performance.now() - started;
    if (clock) {
      const [from, to] = new BigUint64Array(await read(device, ticks, 16));
      // browsers round their clocks, some to nothing
      if (to > from) took = Number(to - from) / 1e6;
    }
    found.push(took);
  }
  return found.sort((a, b) => a - b);
}
