// Both ends of the checks in node.py:
// node peer.js net-server|net-client|http-server|http-client PORT [CONNECTIONS SEED]
'use strict';
const crypto = require('crypto');
const http = require('http');
const net = require('net');

const [role, portWord, connectionsWord, seed] = process.argv.slice(2);
const port = Number(portWord);
const connections = Number(connectionsWord);
const ADDRESS = process.env.SERVER_ADDRESS || '127.0.0.1';
const PING_ROUNDS = 50;
const BULK_BYTES = 4_000_000;

// Repeatable bytes: a key stream of the seed and a name.
function bytes(name, size) {
  const key = crypto.createHash('sha256').update(`${seed}/${name}`).digest();
  return crypto.createCipheriv('aes-256-ctr', key, Buffer.alloc(16)).update(Buffer.alloc(size));
}

function sizeOf(name, largest) {
  return 1 + (bytes(name, 4).readUInt32LE() % largest);
}

function fail(why) {
  console.error(why);
  process.exit(1);
}

// Called by each connection when it has shown that it lives; the last one asks to be looked at.
let living = 0;
const release = [];
function hold() {
  return new Promise((resolve) => {
    release.push(resolve);
    if (++living === connections) {
      process.stdin.once('data', () => {
        process.stdin.destroy();
        release.forEach((go) => go());
      });
      console.log('hold');
    }
  });
}

function netServer() {
  const server = net.createServer({ allowHalfOpen: true }, (socket) => socket.pipe(socket));
  server.listen(port, ADDRESS);
}

async function netTalk(number) {
  const socket = net.connect({ port, host: ADDRESS, allowHalfOpen: true });
  const incoming = socket[Symbol.asyncIterator]();
  for (let round = 0; round < PING_ROUNDS; round++) {
    const ping = bytes(`${number}/${round}`, sizeOf(`${number}/${round}/size`, 5000));
    socket.write(ping);
    let received = Buffer.alloc(0);
    while (received.length < ping.length) {
      const { value, done } = await incoming.next();
      if (done) fail(`connection ${number} ended early`);
      received = Buffer.concat([received, value]);
    }
    if (!received.equals(ping)) fail(`ping ${round} of connection ${number} differs`);
  }
  await hold();
  const bulk = bytes(number, BULK_BYTES);
  for (let at = 0; at < bulk.length; ) {
    const next = at + sizeOf(`${number}/${at}`, 100_000);
    socket.write(bulk.subarray(at, next));
    at = next;
  }
  socket.end();
  const received = [];
  for (let part = await incoming.next(); !part.done; part = await incoming.next()) received.push(part.value);
  if (!Buffer.concat(received).equals(bulk)) fail(`the bulk of connection ${number} differs`);
}

function httpServer() {
  const server = http.createServer((request, response) => {
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', () => response.end(Buffer.concat(parts)));
  });
  server.keepAliveTimeout = 60_000;
  server.listen(port, ADDRESS);
}

function post(agent, body) {
  return new Promise((resolve) => {
    const request = http.request({ host: ADDRESS, port, method: 'POST', agent }, (response) => {
      const parts = [];
      response.on('data', (part) => parts.push(part));
      response.on('end', () => resolve(Buffer.concat(parts)));
    });
    request.on('error', (error) => fail(String(error)));
    request.end(body);
  });
}

async function httpTalk(number) {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  for (let round = 0; round < 2 * PING_ROUNDS; round++) {
    if (round === PING_ROUNDS) await hold();
    const body = bytes(`${number}/${round}`, sizeOf(`${number}/${round}/size`, 1 << (round % 18)));
    if (!(await post(agent, body)).equals(body)) fail(`answer ${round} of connection ${number} differs`);
  }
  agent.destroy();
}

async function client(talk) {
  await Promise.all(Array.from({ length: connections }, (_, number) => talk(number)));
  console.log('all equal');
}

const roles = {
  'net-server': netServer,
  'net-client': () => client(netTalk),
  'http-server': httpServer,
  'http-client': () => client(httpTalk),
};
roles[role]();
