// compiles kernels by Tint, without a browser: node tint.mjs <folder of node_modules> < [{name, text, entry}, ...]
// prints [{name, least, most}, ...]: messages of a device with the least limits and of one with the adapter's, "" if accepted
import fs from 'fs';
import { pathToFileURL } from 'url';

const { create, globals } = await import(pathToFileURL(`${process.argv[2]}/node_modules/webgpu/index.js`));
Object.assign(globalThis, globals);

async function verdict(device, { text, entry }) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: text });
  const { messages } = await module.getCompilationInfo();
  await device.popErrorScope();
  const errors = messages.filter((m) => m.type === 'error').map((m) => `${m.lineNum}:${m.linePos} ${m.message}`);
  if (errors.length) return errors.join('; ');
  try {
    await device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint: entry } });
    return '';
  } catch (error) {
    return error.message;
  }
}

const given = JSON.parse(fs.readFileSync(0));
const gpu = create([]);
const devices = {};
for (const kind of ['least', 'most']) {
  // an adapter can be used for only one device
  const adapter = await gpu.requestAdapter();
  const requiredFeatures = ['shader-f16', 'subgroups'].filter((name) => adapter.features.has(name));
  const requiredLimits = {};
  for (const name of ['maxStorageBuffersPerShaderStage', 'maxComputeWorkgroupStorageSize',
    'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX', 'maxComputeWorkgroupSizeY']) {
    if (kind === 'most') requiredLimits[name] = adapter.limits[name];
  }
  devices[kind] = await adapter.requestDevice({ requiredFeatures, requiredLimits });
}
const found = [];
for (const kernel of given) {
  found.push({
    name: kernel.name, least: await verdict(devices.least, kernel), most: await verdict(devices.most, kernel),
  });
}
console.log(JSON.stringify(found));
process.exit(0);
