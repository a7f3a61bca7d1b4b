// Channels with a selector, or blocking streams: an echo server, and a client that asks it in two ways, or with many connections.
//
//     java Talk nio-server|blocking-server PORT
//     java Talk nio-client|blocking-client PORT pings COUNT | bulk BYTES
//     java Talk nio-crowd PORT pings COUNT CONNECTIONS

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.Random;

public class Talk {
    static final int PING_BYTES = 64;
    static final int BLOCK_BYTES = 64 << 10;
    /** Enough for the compiler to have seen the loop. */
    static final int WARM_PINGS = 20_000;
    /** Of a crowd's connections so many are asked at a time, each time another one. */
    static final int ASKED = 16;

    public static void main(String[] words) throws Exception {
        InetSocketAddress address =
                new InetSocketAddress(InetAddress.getByName("127.0.0.1"), Integer.parseInt(words[1]));
        boolean bulk = words.length > 2 && words[2].equals("bulk");
        long amount = words.length > 3 ? Long.parseLong(words[3]) : 0;
        switch (words[0]) {
            case "nio-server" -> nioServer(address);
            case "blocking-server" -> blockingServer(address);
            case "nio-client" -> tell(amount, nioClient(address, bulk, amount));
            case "blocking-client" -> tell(amount, blockingClient(address, bulk, amount));
            case "nio-crowd" -> tell(amount, nioCrowd(address, amount, Integer.parseInt(words[4])));
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    static void tell(long amount, long nanoseconds) {
        System.out.printf("rate %.1f%n", amount / (nanoseconds / 1e9));
    }

    static void nioServer(InetSocketAddress address) throws IOException {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(address, 128);
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel accepted = listener.accept();
                    accepted.configureBlocking(false);
                    accepted.socket().setTcpNoDelay(true);
                    accepted.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(BLOCK_BYTES));
                } else {
                    echo(key);
                }
            }
            selector.selectedKeys().clear();
        }
    }

    static void echo(SelectionKey key) throws IOException {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer buffer = (ByteBuffer) key.attachment();
        boolean ended = key.isReadable() && channel.read(buffer) < 0;
        buffer.flip();
        channel.write(buffer);
        boolean empty = !buffer.hasRemaining();
        buffer.compact();
        if (ended) {
            channel.close();
        } else {
            key.interestOps(empty ? SelectionKey.OP_READ : SelectionKey.OP_WRITE);
        }
    }

    static void blockingServer(InetSocketAddress address) throws IOException {
        ServerSocket listener = new ServerSocket(address.getPort(), 128, address.getAddress());
        while (true) {
            Socket socket = listener.accept();
            socket.setTcpNoDelay(true);
            new Thread(() -> {
                byte[] block = new byte[BLOCK_BYTES];
                try (socket) {
                    InputStream in = socket.getInputStream();
                    OutputStream out = socket.getOutputStream();
                    for (int size = in.read(block); size >= 0; size = in.read(block)) {
                        out.write(block, 0, size);
                    }
                } catch (IOException problem) {
                    problem.printStackTrace();
                }
            }).start();
        }
    }

    /** Waits by a selector, as event loops do. */
    static long nioClient(InetSocketAddress address, boolean bulk, long amount) throws IOException {
        SocketChannel channel = SocketChannel.open(address);
        channel.socket().setTcpNoDelay(true);
        channel.configureBlocking(false);
        Selector selector = Selector.open();
        SelectionKey key = channel.register(selector, SelectionKey.OP_READ);
        ByteBuffer out = ByteBuffer.allocateDirect(BLOCK_BYTES);
        ByteBuffer in = ByteBuffer.allocateDirect(BLOCK_BYTES);
        for (int round = 0; round < WARM_PINGS; round++) {
            nioPing(channel, selector, out, in);
        }
        long began = System.nanoTime();
        if (!bulk) {
            for (long round = 0; round < amount; round++) {
                nioPing(channel, selector, out, in);
            }
            return System.nanoTime() - began;
        }
        long unsent = amount / BLOCK_BYTES * BLOCK_BYTES;
        long unread = unsent;
        out.clear().flip();
        while (unread > 0) {
            key.interestOps(SelectionKey.OP_READ | (unsent > 0 ? SelectionKey.OP_WRITE : 0));
            selector.select();
            selector.selectedKeys().clear();
            if (unsent > 0) {
                if (!out.hasRemaining()) {
                    out.clear();
                }
                unsent -= channel.write(out);
            }
            in.clear();
            unread -= channel.read(in);
        }
        return System.nanoTime() - began;
    }

    static long nioCrowd(InetSocketAddress address, long amount, int connections) throws IOException {
        Selector selector = Selector.open();
        SocketChannel[] channels = new SocketChannel[connections];
        for (int at = 0; at < connections; at++) {
            channels[at] = SocketChannel.open(address);
            channels[at].socket().setTcpNoDelay(true);
            channels[at].configureBlocking(false);
            channels[at].register(selector, SelectionKey.OP_READ);
        }
        Random random = new Random(1);
        ByteBuffer out = ByteBuffer.allocateDirect(PING_BYTES);
        ByteBuffer in = ByteBuffer.allocateDirect(BLOCK_BYTES);
        long sent = 0;
        long received = 0;
        long began = 0;
        long all = (WARM_PINGS + amount) * PING_BYTES;
        while (received < all) {
            for (; sent < all && sent < received + ASKED * PING_BYTES; sent += PING_BYTES) {
                out.clear();
                if (channels[random.nextInt(connections)].write(out) != PING_BYTES) {
                    throw new IOException("a connection is full");
                }
            }
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                in.clear();
                int came = ((SocketChannel) key.channel()).read(in);
                if (came < 0) {
                    throw new IOException("the server has gone");
                }
                received += came;
            }
            selector.selectedKeys().clear();
            if (began == 0 && received >= (long) WARM_PINGS * PING_BYTES) {
                began = System.nanoTime();
            }
        }
        return System.nanoTime() - began;
    }

    static void nioPing(SocketChannel channel, Selector selector, ByteBuffer out, ByteBuffer in) throws IOException {
        out.clear().limit(PING_BYTES);
        while (out.hasRemaining()) {
            channel.write(out);
        }
        in.clear().limit(PING_BYTES);
        while (in.hasRemaining()) {
            selector.select();
            selector.selectedKeys().clear();
            if (channel.read(in) < 0) {
                throw new IOException("the server has gone");
            }
        }
    }

    static long blockingClient(InetSocketAddress address, boolean bulk, long amount) throws Exception {
        try (Socket socket = new Socket(address.getAddress(), address.getPort())) {
            socket.setTcpNoDelay(true);
            InputStream in = socket.getInputStream();
            OutputStream out = socket.getOutputStream();
            byte[] ping = new byte[PING_BYTES];
            for (int round = 0; round < WARM_PINGS; round++) {
                out.write(ping);
                in.readNBytes(ping, 0, PING_BYTES);
            }
            long began = System.nanoTime();
            if (!bulk) {
                for (long round = 0; round < amount; round++) {
                    out.write(ping);
                    in.readNBytes(ping, 0, PING_BYTES);
                }
                return System.nanoTime() - began;
            }
            long blocks = amount / BLOCK_BYTES;
            Thread sender = new Thread(() -> {
                byte[] block = new byte[BLOCK_BYTES];
                try {
                    for (long sent = 0; sent < blocks; sent++) {
                        out.write(block);
                    }
                } catch (IOException problem) {
                    problem.printStackTrace();
                }
            });
            sender.start();
            byte[] block = new byte[BLOCK_BYTES];
            for (long unread = blocks * BLOCK_BYTES; unread > 0; ) {
                unread -= in.read(block);
            }
            sender.join();
            return System.nanoTime() - began;
        }
    }
}
