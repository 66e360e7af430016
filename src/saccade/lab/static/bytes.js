// base64 as bytes

export const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
