// An omniORB server that gives a block back, and a client that asks for it.
//
//     orb server FILE -ORBendPoint giop:tcp:127.0.0.1:PORT     its reference goes into FILE
//     orb client FILE BYTES COUNT [THREADS]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "block.hh"

class Servant : public POA_Echo {
    Echo::Block *back(const Echo::Block &block) override { return new Echo::Block(block); }
};

static int serve(CORBA::ORB_ptr orb, const std::string &file) {
    CORBA::Object_var root = orb->resolve_initial_references("RootPOA");
    PortableServer::POA_var poa = PortableServer::POA::_narrow(root);
    PortableServer::Servant_var<Servant> servant = new Servant;
    PortableServer::ObjectId_var id = poa->activate_object(servant);
    CORBA::Object_var object = poa->id_to_reference(id);
    CORBA::String_var reference = orb->object_to_string(object);
    poa->the_POAManager()->activate();
    std::ofstream(file + ".new") << reference;
    std::rename((file + ".new").c_str(), file.c_str());
    orb->run();
    return 0;
}

/// COUNT calls, behind a tenth as many that do not count. Their time; a wrong answer ends the program.
static double ask(Echo_ptr echo, int bytes, int count) {
    Echo::Block block;
    block.length(bytes);
    auto began = std::chrono::steady_clock::now();
    for (int done = -count / 10; done < count; done++) {
        if (done == 0) {
            began = std::chrono::steady_clock::now();
        }
        Echo::Block_var answer = echo->back(block);
        if (answer->length() != block.length()) {
            std::cerr << "the answer has " << answer->length() << " bytes\n";
            std::exit(1);
        }
    }
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    return took.count();
}

/// Threads that call at once have a connection each.
static int ask_all(CORBA::ORB_ptr orb, const std::string &file, int bytes, int count, int threads) {
    std::string reference;
    std::ifstream(file) >> reference;
    CORBA::Object_var object = orb->string_to_object(reference.c_str());
    Echo_var echo = Echo::_narrow(object);
    std::vector<double> rates(threads);
    std::vector<std::thread> all;
    for (double &rate : rates) {
        all.emplace_back([&] { rate = count / ask(echo, bytes, count); });
    }
    for (std::thread &one : all) {
        one.join();
    }
    std::cout << "rate " << std::accumulate(rates.begin(), rates.end(), 0.0) << "\n";
    return 0;
}

int main(int argc, char **argv) {
    CORBA::ORB_var orb = CORBA::ORB_init(argc, argv);
    std::string role = argc > 2 ? argv[1] : "";
    if (role == "server") {
        return serve(orb, argv[2]);
    }
    if (role == "client" && (argc == 5 || argc == 6)) {
        return ask_all(orb, argv[2], std::atoi(argv[3]), std::atoi(argv[4]), argc == 6 ? std::atoi(argv[5]) : 1);
    }
    std::cerr << "orb server FILE | client FILE BYTES COUNT [THREADS]\n";
    return 2;
}
